"""Attention modules over images, from (B, C, H, W) to (B, C, H, W)."""

from lowtide.attention.spatial.global_attention import (
    ChannelAttention,
    LinearAttention,
    TransposedAttention,
)
from lowtide.attention.spatial.hierarchical import HierarchicalAttention
from lowtide.attention.spatial.local_window import LocalWindowAttention
from lowtide.attention.spatial.onnx_graph import export_onnx
from lowtide.attention.spatial.window_grid import WindowGeometry

__all__ = [
    "ChannelAttention",
    "HierarchicalAttention",
    "LinearAttention",
    "LocalWindowAttention",
    "TransposedAttention",
    "WindowGeometry",
    "export_onnx",
]
