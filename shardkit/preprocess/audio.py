"""The steps for the audio of a sample: resample, mix to mono; audio that changes becomes FLAC."""

from __future__ import annotations

from dataclasses import dataclass

from shardkit.codecs.image import NotAnImageError, unusable
from shardkit.codecs.media import media_of
from shardkit.codecs.sound import encode_flac, library_versions, mono, opened, resampled
from shardkit.errors import UsageError
from shardkit.options import AudioOptions
from shardkit.preprocess.items import Shaped
from shardkit.schema import Audio, Schema, audio_fields


@dataclass(frozen=True)
class AudioSteps:
    """The steps for the audio in these fields."""

    options: AudioOptions
    fields: tuple[str, ...]

    @classmethod
    def of(cls, schema: Schema, options: AudioOptions) -> AudioSteps | None:
        """Return the steps, or None if there are none. Raises UsageError if no field is audio."""
        if not options.active:
            return None
        fields = tuple(audio_fields(schema))
        if not fields:
            found = ", ".join(f"{name}: {type(kind).__name__}" for name, kind in schema.items())
            raise UsageError("there are options for audio, but no audio", found=found or None)
        library_versions()  # raises if a library is missing
        return cls(options, fields)

    def __call__(self, shaped: Shaped) -> None:
        """Change a sample. Raises SampleError for audio that cannot be decoded or stored."""
        for name in self.fields:
            if name in shaped.sample:
                try:
                    shaped.sample[name] = self._stored(shaped, shaped.sample[name])
                except NotAnImageError as error:
                    raise unusable(error, shaped.sample["__key__"], name) from error

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that determine the bytes."""
        return library_versions()

    def _stored(self, shaped: Shaped, data: bytes) -> bytes:
        """Return audio as it is to be stored: as is if the header shows that nothing changes."""
        about = media_of(Audio(), data)
        rate = self.options.sample_rate or about.sampling_rate
        reasons = []
        if rate != about.sampling_rate:
            reasons.append("audio of another rate")
        if self.options.mono and about.channels != 1:
            reasons.append("audio of several channels")
        if not reasons:
            return data
        with opened(data) as sound:
            samples = mono(sound.read()) if self.options.mono else sound.read()
            rate, bits = self.options.sample_rate or sound.rate, sound.bits
            samples = resampled(samples, sound.rate, rate, "VHQ")
        made, clipped = encode_flac(samples, rate, bits)
        shaped.reasons.update(reasons)
        if clipped:
            shaped.ignored["files of audio clipped at full scale"] += 1
            shaped.ignored["values of audio clipped at full scale"] += clipped
        return made
