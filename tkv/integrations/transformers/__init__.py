"""tkv under models of Hugging Face transformers: :func:`use_tkv`. Needs transformers 4.57 or newer."""

import transformers

from tkv.errors import UnsupportedError

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (4, 57):
    raise UnsupportedError(f"transformers: expected version 4.57 or newer, got {transformers.__version__}")

from tkv.integrations.transformers.cache import TkvCache
from tkv.integrations.transformers.model import TkvModel, use_tkv

__all__ = ["TkvCache", "TkvModel", "use_tkv"]
