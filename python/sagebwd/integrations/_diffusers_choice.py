"""DIFFUSERS_ATTN_BACKEND=sagebwd: diffusers reads it before anybody can give it a backend.

So its default takes that place until diffusers has its backends, and with them ours.
"""

from diffusers.utils import constants

from sagebwd.integrations._on_import import when_imported

_NAME = "DIFFUSERS_ATTN_BACKEND"

#: Whether the variable asks for sagebwd.
is_ours = getattr(constants, _NAME, None) == "sagebwd"
if is_ours:
    setattr(constants, _NAME, "native")
    when_imported("diffusers.models.attention_dispatch", "sagebwd.integrations.diffusers")
