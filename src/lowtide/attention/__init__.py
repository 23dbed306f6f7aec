"""Scaled dot-product attention: one call, many backends, and why each is chosen."""

from lowtide.attention.backends import BACKENDS
from lowtide.attention.dispatch import Policy, Resolution, Verdict, resolve
from lowtide.attention.functional import attention, explain
from lowtide.attention.patch import Use, use
from lowtide.attention.spec import AttentionCall, AttentionSpec, LocalDevice

__all__ = [
    "BACKENDS",
    "AttentionCall",
    "AttentionSpec",
    "LocalDevice",
    "Policy",
    "Resolution",
    "Use",
    "Verdict",
    "attention",
    "explain",
    "resolve",
    "use",
]
