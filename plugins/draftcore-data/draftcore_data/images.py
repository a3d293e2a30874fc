"""Read the images of rows, and lay them out among a row's tokens as the target's own processor does."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from draftcore.contracts.capture import Image, RowError
from draftcore.errors import UsageError, raised
from draftcore.files import regular
from draftcore_data.conversations import IMAGE_UNREAD, NO_PROCESSOR


@dataclass(frozen=True)
class OwnProcessor:
    """The own processor of a target that sees, loaded when it is first needed."""

    path: str
    source: Mapping[str, Any]  # as `from_pretrained` takes it
    _loaded: list[tuple[Any, str]] = field(default_factory=list, init=False, repr=False)

    def __reduce__(self) -> Any:  # another process loads it by itself
        return OwnProcessor, (self.path, self.source)

    def load(self) -> tuple[Any, str]:
        """Return the processor, and all that it reads images by; or None, and why it cannot be loaded."""
        from transformers import AutoProcessor  # 1 s: with torch

        if not self._loaded:
            try:
                processor = AutoProcessor.from_pretrained(self.path, **self.source)
                self._loaded.append((processor, str(processor.image_processor.to_json_string())))
            except Exception as error:  # of a library that it lacks, or of the model's own code
                lacks = [name for name in ("PIL", "torchvision") if find_spec(name) is None]
                hint = f"not installed is {' and '.join(lacks)}; " if lacks else ""
                self._loaded.append((None, hint + raised(error)))
        return self._loaded[0]

    def identity(self) -> str:
        return self.load()[1]

    def write(
        self, text: str, spans: Sequence[tuple[int, int]], uris: Sequence[str]
    ) -> tuple[str, list[tuple[int, int]], list[int], tuple[Image, ...]]:
        """Write images' tokens into a text; return it, the spans in it, all its tokens, and the images.

        Raises `RowError` for an image that cannot be read, and where the processor refuses.
        """
        images, given = self._call(text, uris, return_text_replacement_offsets=True)
        places, spans = given.get("text_replacement_offsets") or [[]], list(spans)
        for place in reversed(places[0]):  # so that what is before stays where it is
            (start, end), new = place["span"], place["replacement"]
            text, more = text[:start] + new + text[end:], len(new) - (end - start)
            spans = [(a + more * (a >= end), b + more * (b >= end)) for a, b in spans]
        return text, spans, list(given["input_ids"][0]), images

    def inputs(self, token_ids: Sequence[int], images: Sequence[Image]) -> Any:
        """Return what the target's forward is given of a row, a BatchFeature of tensors.

        Raises `RowError` for an image that is not what it was when the row was rendered.
        """
        import torch

        text = getattr(self.load()[0], "image_token", "") * len(images)
        found, given = self._call(text, [one.uri for one in images], return_tensors="pt")
        for now, then in zip(found, images, strict=True):
            if now != then:
                raise RowError("an image was changed since its row was rendered", now.uri[:200])
        known = given.pop("input_ids")[0].tolist()
        given.pop("attention_mask", None)
        for key in [key for key in given if key.endswith("token_type_ids")]:
            kinds = dict(zip(known, given[key][0].tolist(), strict=True))  # each is a token's kind
            given[key] = torch.tensor([[kinds.get(one, 0) for one in token_ids]])
        given["input_ids"] = torch.tensor([list(token_ids)])
        return given

    def _call(
        self, text: str, uris: Sequence[str], **options: Any
    ) -> tuple[tuple[Image, ...], Any]:
        own, identity = self.load()
        if own is None:
            raise RowError(f"{NO_PROCESSOR}: {identity}")
        import PIL.Image
        from transformers.image_utils import load_image

        images, pictures = list[Image](), list[Any]()
        for uri in uris:
            try:
                data = (
                    urlopen(uri).read()
                    if uri.startswith("data:")
                    else regular(Path(uri)).read_bytes()
                )
                pictures.append(load_image(PIL.Image.open(io.BytesIO(data))))
            except (OSError, ValueError, UsageError, PIL.Image.DecompressionBombError) as error:
                raise RowError(IMAGE_UNREAD, uri[:1000]) from error
            digest = hashlib.blake2b(identity.encode() + b"\0" + data, digest_size=16)
            images.append(Image(uri, digest.hexdigest()))
        try:
            given = own(text=[text], images=pictures, add_special_tokens=False, **options)
        except Exception as error:  # its code is others', and what it raises is about this row
            raise RowError("the target's processor refuses it", raised(error)) from error
        return tuple(images), given
