"""Scaled dot-product attention: one call, many backends, and why each is chosen."""

from lowtide.attention.backends import BACKENDS
from lowtide.attention.dispatch import BackendVerdict, Policy, ResolvedBackend, resolve
from lowtide.attention.functional import attention, explain
from lowtide.attention.patch import RoutedAttention, use
from lowtide.attention.spec import AttentionCall, AttentionSpec, LocalDevice

__all__ = [
    "BACKENDS",
    "AttentionCall",
    "AttentionSpec",
    "BackendVerdict",
    "LocalDevice",
    "Policy",
    "ResolvedBackend",
    "RoutedAttention",
    "attention",
    "explain",
    "resolve",
    "use",
]
