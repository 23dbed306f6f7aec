"""Attention: one call, every backend, and a reason for each that is not taken."""

from lowtide.attention.backends import BACKENDS
from lowtide.attention.call import AttentionCall, AttentionSpec, LocalDevice
from lowtide.attention.functional import attention, explain
from lowtide.attention.resolution import Policy, Resolution, Verdict, resolve
from lowtide.attention.routing import Use, use

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
