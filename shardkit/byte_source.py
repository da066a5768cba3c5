"""The former place of what formats in other packages import: use `shardkit.formats.api`."""

from shardkit.storage.byte_source import LocalFile, Table

__all__ = ["LocalFile", "Table"]
