"""The streaming engine: the order of samples, and batches of numpy arrays.

`shardkit.torch` has the same classes for torch.
"""

from shardkit.stream.dataset import StreamingDataset as StreamingDataset
from shardkit.stream.loader import Loader as Loader
