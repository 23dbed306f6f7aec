"""Several chunks as one program: results, order, and what of the state is held."""

import torch

from lowtide.streaming.capture.export_graph import capture_graph
from lowtide.streaming.capture.model_inputs import ModelInputs
from lowtide.streaming.engine.clip_chunks import unroll_chunks
from lowtide.streaming.engine.executor import BandExecutor, collect_rows
from lowtide.streaming.engine.placement import memory_page_factory
from lowtide.streaming.engine.program import lower_to_rows
from lowtide.streaming.engine.segments import cut_segments
from lowtide.streaming.pages.page import MemoryPage
from support.causal_modules import CHANNELS, LaterWithAttention, causal_modules, whole_clip

ROWS, CHUNKS = 3, 4


def chunk_programs(clip):
    first, later = causal_modules(LaterWithAttention)
    chunk = clip[:, :, :1].contiguous()
    state = [one.clone() for one in first(chunk)[1:]]
    found = []
    for module, given in ((first, [chunk]), (later, [chunk, *state])):
        inputs = ModelInputs(tuple(given), dict.fromkeys(range(len(given)), ROWS))
        found.append(lower_to_rows(capture_graph(module, inputs)))
    return *found, later


def run(program, tensors, bands):
    segments = cut_segments(program)
    pages = memory_page_factory(program, tensors[0].device)
    executor = BandExecutor(program, segments, [bands] * len(segments), pages)
    sources = [MemoryPage.from_tensor(one.contiguous(), ROWS) for one in tensors]
    found = collect_rows(program, executor.run(sources))
    return [found[program.outputs.index(one)] for one in program.graph.outputs]


@torch.no_grad()
def test_chunks_in_one_program_give_the_whole_clip_and_its_last_state():
    clip = torch.rand(1, 3, CHUNKS, 21, 10)
    first, later, module = chunk_programs(clip)
    wanted = whole_clip(module, clip)
    all_of_them = unroll_chunks([first, *[later] * (CHUNKS - 1)], keep_state=False)
    # attention is after the first segment in each of them, and nothing else is
    assert len(cut_segments(all_of_them)) == len(cut_segments(later)) == 2
    # weights are there once
    assert len(all_of_them.graph.tensors) == len(later.graph.tensors)
    for bands in (1, 5, 21):
        found = torch.cat(run(all_of_them, clip.split(1, 2), bands), 2)
        assert (found - wanted).abs().max() <= 3e-6

    start = unroll_chunks([first, later], keep_state=True)
    one, two, *state = run(start, clip[:, :, :2].split(1, 2), 4)
    assert [tuple(one.shape) for one in state] == [(1, 3, 2, 21, 10), (1, CHANNELS, 2, 42, 20)]
    rest = unroll_chunks([later, later], keep_state=True)
    three, four, *_ = run(rest, [*clip[:, :, 2:].split(1, 2), *state], 7)
    assert (torch.cat([one, two, three, four], 2) - wanted).abs().max() <= 3e-6
