"""The streaming engine: which sample comes when, and batches of numpy arrays.

`shardkit.torch` has the same classes for torch.
"""

from shardkit.stream.dataset import StreamingDataset as StreamingDataset
from shardkit.stream.loader import Loader as Loader
