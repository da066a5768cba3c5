"""The streaming engine: the order of samples, and batches of numpy arrays.

`shardkit.torch` has the same classes for torch.

Each imports only those on lines below its own:

    torch_loader
    loader
    dataset profile
    batches quality
    gpu_decoding stream
    ranks read_ahead
    options schedule
    collate reading sampling
    batch_sizes batching order segments
"""

from shardkit.stream.dataset import StreamingDataset as StreamingDataset
from shardkit.stream.loader import Loader as Loader
from shardkit.stream.segments import documents as documents
