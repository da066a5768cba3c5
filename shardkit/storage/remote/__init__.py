"""Remote data, addressed by URL: object stores, web servers and fsspec file systems."""
