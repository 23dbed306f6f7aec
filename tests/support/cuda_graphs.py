"""PyTorch's capture of CUDA graphs, stood in for on a CPU."""

import torch


class GraphsOnTheCpu:
    """Reruns what was captured, into the same memory, and counts both."""

    def __init__(self):
        self.captured = self.replayed = 0

    def __call__(self, run, sample):
        self.captured += 1
        place = run(*sample)

        def replay(*inputs):
            self.replayed += 1
            for static, given in zip(sample, inputs, strict=True):
                static.copy_(given)
            return place.copy_(run(*sample))

        return replay


def graphs_on_the_cpu(monkeypatch):
    """Let the CPU capture graphs; returns how often it did."""
    graphs = GraphsOnTheCpu()
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graphs)
    return graphs
