"""Base classes of diffusers, an optional package."""

from lowtide.core.errors import UsageError

try:
    from diffusers.configuration_utils import ConfigMixin, register_to_config
    from diffusers.models.modeling_utils import ModelMixin
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline
    from diffusers.schedulers.scheduling_utils import SchedulerMixin
    from diffusers.utils.outputs import BaseOutput
except ImportError as error:
    raise UsageError(
        "a pipeline of diffusers needs diffusers", hint="pip install diffusers"
    ) from error

__all__ = [
    "BaseOutput",
    "ConfigMixin",
    "DiffusionPipeline",
    "ModelMixin",
    "SchedulerMixin",
    "register_to_config",
]
