"""Stores to test against: S3 (moto), Google (our own), Azure (azurite), and nginx.

Each is a process on loopback; `options` are for obstore's stores and `from_url`, `environ` the same
by environment variables. Nothing is asked of the machine's own credentials.
"""

import base64
import hashlib
import hmac
import importlib.util
import itertools
import os
import sys
import urllib.error
import urllib.request
from datetime import timedelta
from email.utils import formatdate

from tests.remote.process import Process, executable

RETRIES = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}  # for obstore, in tests
# For moto, which wants to see that a request is signed, but does not check by whom.
SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=testkey/20260101/us-east-1/s3/aws4_request"}
_buckets = itertools.count(1)


def request(url, method="GET", data=None, **headers):
    """What a server answers, without any client library between."""
    asked = urllib.request.Request(url, data, headers, method=method)
    if data is not None:  # or urllib calls it a form, and moto parses it
        asked.add_header("Content-Type", "application/octet-stream")
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return answer.read()


class Store(Process):
    """An object store. Without `endpoint`, the methods' results are for the server itself; give
    them a proxy's to pass through it. `options` are keyword arguments for obstore's `from_url`,
    besides `client_options`, and `environ` the same as environment variables."""

    scheme = ""

    def bucket(self):
        """Makes one that is empty."""
        name = f"bucket{os.getpid()}-{next(_buckets)}"
        request(f"{self.endpoint}/{name}", "PUT")
        return name

    def url(self, bucket, key=""):
        return f"{self.scheme}://{bucket}/{key}".rstrip("/")

    def open(self, bucket, endpoint=None, **client):
        """obstore's store for a bucket; `client` are its `client_options`."""
        from obstore.store import from_url

        return from_url(
            self.url(bucket),
            client_options={"allow_http": True, "timeout": "20s", **client},
            retry_config=RETRIES,
            **self.options(endpoint),
        )


def s3_environ(endpoint):
    """What clients of S3 need to know of a server, as environment variables."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "testkey",
        "AWS_SECRET_ACCESS_KEY": "testsecret",
        "AWS_ALLOW_HTTP": "true",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class S3(Store):
    """moto: it looks at no credentials. Any key and secret do."""

    scheme = "s3"

    def __init__(self):
        super().__init__(lambda port: [sys.executable, "-m", "moto.server", "-p", str(port)])

    @staticmethod
    def missing():
        return "" if importlib.util.find_spec("moto") else "moto[server] is not installed"

    def options(self, endpoint=None):
        return {
            "endpoint": endpoint or self.endpoint,
            "region": "us-east-1",
            "access_key_id": "testkey",
            "secret_access_key": "testsecret",
        }

    def environ(self, endpoint=None):
        return s3_environ(endpoint or self.endpoint)


class Google(Store):
    """Our own (tests/remote/google.py)."""

    scheme = "gs"

    def __init__(self):
        super().__init__(lambda port: [sys.executable, "-m", "tests.remote.google", str(port)])

    @staticmethod
    def missing():
        return ""

    def options(self, endpoint=None):
        return {"base_url": endpoint or self.endpoint, "bearer_token": "testtoken"}

    def environ(self, endpoint=None):
        return {
            "GOOGLE_BASE_URL": endpoint or self.endpoint,
            "GOOGLE_BEARER_TOKEN": "testtoken",
            "GOOGLE_ALLOW_HTTP": "true",
        }

    def copy(self, bucket, to):
        """Makes one bucket equal to another, by one request."""
        request(f"{self.endpoint}/{to}?copy={bucket}", "PUT")
        return to


class Azure(Store):
    """azurite; its account and key are those that it documents. A bucket is a container."""

    scheme = "az"
    account = "devstoreaccount1"
    secret = (
        "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    )

    def __init__(self):
        flags = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
        super().__init__(
            lambda port: [
                executable("azurite-blob") or "azurite-blob",
                "--blobHost", "127.0.0.1", "--blobPort", str(port), *flags,
            ]
        )  # fmt: skip

    @staticmethod
    def missing():
        return "" if executable("azurite-blob") else "azurite (npm) is not installed"

    def options(self, endpoint=None):
        return {
            "endpoint": f"{endpoint or self.endpoint}/{self.account}",
            "account_name": self.account,
            "account_key": self.secret,
        }

    def environ(self, endpoint=None):
        return {
            "AZURE_STORAGE_ENDPOINT": f"{endpoint or self.endpoint}/{self.account}",
            "AZURE_STORAGE_ACCOUNT_NAME": self.account,
            "AZURE_STORAGE_ACCOUNT_KEY": self.secret,
            "AZURE_ALLOW_HTTP": "true",
        }

    def bucket(self):
        name, date = f"bucket{os.getpid()}-{next(_buckets)}", formatdate(usegmt=True)
        signed = (
            "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
            f"/{self.account}/{self.account}/{name}\nrestype:container"
        )
        digest = hmac.digest(base64.b64decode(self.secret), signed.encode(), hashlib.sha256)
        headers = {
            "x-ms-date": date,
            "x-ms-version": "2021-08-06",
            "Authorization": f"SharedKey {self.account}:{base64.b64encode(digest).decode()}",
            "Content-Length": "0",
        }
        url = f"{self.endpoint}/{self.account}/{name}?restype=container"
        request(url, "PUT", **headers)
        return name


_NGINX = """
daemon off; master_process off; error_log stderr; pid {work}/pid;
events {{ worker_connections 1024; }}
http {{
    access_log off; sendfile on; tcp_nodelay on; keepalive_requests 100000;
    client_body_temp_path {work}/body; proxy_temp_path {work}/proxy; fastcgi_temp_path {work}/fcgi;
    uwsgi_temp_path {work}/uwsgi; scgi_temp_path {work}/scgi;
    default_type application/octet-stream; client_max_body_size 0;
    server {{
        listen 127.0.0.1:{port}; root {root}; autoindex on;
        dav_methods PUT DELETE; create_full_put_path on;
        location /unlisted/ {{ autoindex off; }}
    }}
}}
"""


class Nginx(Process):
    """Serves a folder, and takes PUT and DELETE; `work` is an empty one for its own files."""

    def __init__(self, root, work):
        self.root = root

        def command(port):
            config = work / "nginx.conf"
            config.write_text(_NGINX.format(work=work, port=port, root=root))
            flags = ["-e", "stderr", "-p", str(work), "-c", str(config)]
            return [executable("nginx") or "nginx", *flags]

        super().__init__(command)

    @staticmethod
    def missing():
        return "" if executable("nginx") else "nginx is not installed"
