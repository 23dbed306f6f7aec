# Everything here works on a machine with Python 3.11 or newer, git and make: each target makes
# the virtual environment it needs. Versions are those of constraints.txt; `make PINS= test` takes
# the newest instead.

PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
PINS ?= -c constraints.txt
# What `make golden` compares with: results of all jobs as they were before the house was cleared out.
BASE ?= 9dd9ab6f
# What `make test` runs, by default everything, and what of it measures or plans.
TESTS ?=
MEASURED := $(addprefix tests/,attention integrations jobs memory models streaming)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo golden demo-train demo-forecast demo-denoise demo-video test test-isa test-oldest test-slow check fix bench bench-denoising bench-memory bench-streaming docs test-gpu bench-training bench-gpu gpu-report wheel clean

demo: $(VENV)/.runtime
	$(BIN)/lowtide upscale examples/coffee.jpg -o demo/coffee_x2.png --budget 512MiB --force
	@echo "the picture is demo/coffee_x2.png"

# A few minutes: photographs, a training, its curves, and a picture before and after.
demo-train: $(VENV)/.dev
	$(BIN)/python scripts/demo_train.py

# Three centuries of sunspots: two cycles ahead, and how good such forecasts were.
demo-forecast: $(VENV)/.dev
	mkdir -p demo
	$(BIN)/python scripts/demo_forecast.py demo/sunspots.csv
	$(BIN)/lowtide forecast demo/sunspots.csv --horizon 22 -o demo/sunspots_forecast.csv --plot demo/sunspots.png --force
	$(BIN)/lowtide backtest demo/sunspots.csv --horizon 11 --quiet
	@echo "the picture is demo/sunspots.png"

# A photograph with noise: cleaner, its scores, and a picture beside non-local means.
demo-denoise: $(VENV)/.dev
	$(BIN)/python scripts/demo_denoise.py demo/denoise
	$(BIN)/lowtide denoise demo/denoise/noisy.png -o demo/denoise/denoised.png --reference demo/denoise/clean.png --comparison demo/denoise/comparison.png --force
	@echo "the picture is demo/denoise/comparison.png"

# Two seconds made from a photograph, or of a clip of yours, ×2 with its sound: CLIP=FILE.
demo-video: $(VENV)/.dev
	$(if $(CLIP),mkdir -p demo,$(BIN)/python scripts/demo_video.py clip demo/clip.mp4)
	$(BIN)/lowtide video $(or $(CLIP),demo/clip.mp4) -o demo/clip_x2.mkv --time 0:2 --force
	$(BIN)/python scripts/demo_video.py picture $(or $(CLIP),demo/clip.mp4) demo/clip_x2.mkv demo/clip_x2.png
	@echo "the video is demo/clip_x2.mkv, a frame of it demo/clip_x2.png"

# Two processes of one thread each; what a test measures of its process is its own.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(TESTS)

# The same with the oldest PyTorch that pyproject.toml allows, in an environment of its own.
test-oldest: $(OLDEST)/constraints.txt
	$(MAKE) test VENV=$(OLDEST) PINS="-c $(OLDEST)/constraints.txt"

# All else as pinned, but for a NumPy that its Triton's interpreter can use.
$(OLDEST)/constraints.txt: pyproject.toml constraints.txt
	mkdir -p $(OLDEST)
	grep -vE '^(torch|torchvision|triton|numpy|cuda-.*|nvidia-.*)==' constraints.txt > $@
	sed -nE 's/^ *"(torch|torchvision)>=([0-9.]+)",$$/\1==\2.*/p' pyproject.toml >> $@
	echo 'numpy<2.4' >> $@

# What measures and plans, as on processors without AVX2 and without AVX-512. The cache of PyTorch's
# compiler does not tell these apart: code of one gives garbage as the other.
test-isa: $(VENV)/.dev
	caches=$$(mktemp -d) && trap 'rm -r "$$caches"' EXIT && \
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 TORCHINDUCTOR_CACHE_DIR="$$caches/sse" $(MAKE) test TESTS="$(MEASURED)" && \
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 TORCHINDUCTOR_CACHE_DIR="$$caches/avx2" $(MAKE) test TESTS="$(MEASURED)"

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

# A few minutes: results, memory and time of every job, against those of an earlier revision.
golden: $(VENV)/.dev
	$(BIN)/python scripts/golden.py $(BASE)

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu

check: $(VENV)/.dev
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/codespell src tests benchmarks scripts docs examples *.md
	$(BIN)/python scripts/render_results.py --check
	$(BIN)/python scripts/render_imports.py --check

fix: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/startup.py --fresh
	$(BIN)/python benchmarks/first_contact.py --fresh
	$(BIN)/python benchmarks/call_counts.py --fresh
	$(BIN)/python benchmarks/tile_loop.py --fresh
	$(BIN)/python benchmarks/large_images.py --fresh
	$(BIN)/python scripts/render_results.py

# Hours; each script goes on where it was.
bench-memory: $(VENV)/.dev
	$(BIN)/python benchmarks/memory_grid.py --jobs 2
	$(BIN)/python benchmarks/memory_grid.py --repredict
	$(BIN)/python benchmarks/memory_tiled.py
	$(BIN)/python benchmarks/memory_streamed.py
	$(BIN)/python benchmarks/fit.py
	$(BIN)/python benchmarks/memory_summary.py
	$(BIN)/python benchmarks/orderings.py
	$(BIN)/python benchmarks/memory_peers.py
	$(BIN)/python benchmarks/budgets.py
	$(BIN)/python benchmarks/budget_kept.py
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/heap_settings.py
	$(BIN)/python scripts/render_results.py

# Hours; each script goes on where it was. Times are only worth something on a quiet machine.
bench-streaming: $(VENV)/.dev
	$(BIN)/python benchmarks/streaming.py
	$(BIN)/python benchmarks/large_streamed.py
	$(BIN)/python benchmarks/fast_windows.py
	$(BIN)/python benchmarks/drct_photograph.py
	$(BIN)/python benchmarks/folder_pipeline.py
	$(BIN)/python benchmarks/worker_processes.py
	$(BIN)/python benchmarks/compiled.py
	$(BIN)/python benchmarks/tiling_error.py
	$(BIN)/python benchmarks/seams.py
	$(BIN)/python scripts/render_results.py

# Hours; each script goes on where it was.
bench-training: $(VENV)/.dev
	$(BIN)/python benchmarks/training_memory.py
	$(BIN)/python benchmarks/ldm4ts_memory.py
	$(BIN)/python benchmarks/paragonsr2_variants.py
	$(BIN)/python benchmarks/attention_helps.py
	$(BIN)/python scripts/render_results.py

# An hour; each script goes on where it was.
bench-denoising: $(VENV)/.dev
	$(BIN)/python benchmarks/denoise.py
	$(BIN)/python benchmarks/denoise_pictures.py
	$(BIN)/python benchmarks/denoise_large.py
	$(BIN)/python benchmarks/denoise_raw_noise.py
	$(BIN)/python benchmarks/denoise_attention.py
	$(BIN)/python benchmarks/denoise_steps.py
	$(BIN)/python scripts/render_results.py

bench-gpu: $(VENV)/.dev
	$(BIN)/python benchmarks/tile_loop.py --device cuda:0 --fresh
	$(BIN)/python benchmarks/large_images.py --device cuda:0 --fresh
	$(BIN)/python benchmarks/attention_gpu.py --fresh
	$(BIN)/python benchmarks/streaming_gpu.py --fresh

# At most 8 minutes: what was never measured on a GPU, oldest first; goes on where it was.
gpu-report: $(VENV)/.dev
	$(BIN)/python benchmarks/gpu_report.py --minutes 8

docs: $(VENV)/.docs
	$(BIN)/sphinx-build -W -q -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

wheel: $(VENV)/.dev
	$(BIN)/python -m build --wheel

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade "pip>=25.1"

$(VENV)/.runtime: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install $(PINS) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) install $(PINS) --group dev
	@touch $@

$(VENV)/.docs: $(VENV)/.runtime
	$(PIP) install $(PINS) --group docs
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) dist build demo docs/_build
