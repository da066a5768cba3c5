"""Transforms of samples at load time: for images, audio and video, and the user's own.

Each imports only those on lines below its own:

    transforms
    media
    chain
    calls
    direct functions images
    draws labels on_image steps
"""

from shardkit.transforms.draws import Draws as Draws
from shardkit.transforms.media import Mono as Mono
from shardkit.transforms.media import RandomClip as RandomClip
from shardkit.transforms.media import Resample as Resample
from shardkit.transforms.media import SampleFrames as SampleFrames
from shardkit.transforms.steps import CenterCrop as CenterCrop
from shardkit.transforms.steps import Decode as Decode
from shardkit.transforms.steps import Normalize as Normalize
from shardkit.transforms.steps import RandomHorizontalFlip as RandomHorizontalFlip
from shardkit.transforms.steps import RandomResizedCrop as RandomResizedCrop
from shardkit.transforms.steps import Resize as Resize
from shardkit.transforms.transforms import Transforms as Transforms
