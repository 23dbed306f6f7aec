"""What captures of other sizes leave in the process."""

import linecache

import torch
from torch import fx, nn

from lowtide.streaming.capture.export_graph import capture_graph


def test_code_generated_for_a_capture_does_not_stay():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3)).eval()
    users = fx.symbolic_trace(network)
    theirs = users.forward.__code__.co_filename
    before = set(linecache.cache)
    for size in range(20, 24):
        capture_graph(network, torch.zeros(1, 3, size, size))
    assert not {name for name in set(linecache.cache) - before if "eval_with_key" in name}
    assert "def forward" in "".join(linecache.getlines(theirs))  # a graph of the user's own
