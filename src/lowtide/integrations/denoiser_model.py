"""SlimUNet and its samplers as components that diffusers saves and loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, get_args

from torch import Tensor

from lowtide.core.errors import UsageError
from lowtide.integrations.diffusers_bases import (
    ConfigMixin,
    ModelMixin,
    SchedulerMixin,
    register_to_config,
)
from lowtide.models.denoiser.denoiser import modulation_at, pixel_terms
from lowtide.models.denoiser.sampling import (
    NoiseSchedule,
    SamplingStep,
    sampling_steps,
    schedule_of,
)
from lowtide.models.denoiser.slim_unet import SlimUNet
from lowtide.models.denoiser.slim_unet_config import Prediction, SchedulerName, SlimUNetConfig
from lowtide.models.loaded_model import pad


class DenoiserModel(ModelMixin, ConfigMixin):
    """A `SlimUNet` with its preconditioning, from noisy image to clean one.

    Args:
        network: Fields of `SlimUNetConfig`, as ``config.json`` has them.
    """

    @register_to_config
    def __init__(self, network: dict[str, Any]) -> None:
        super().__init__()
        self.sizes = SlimUNetConfig.from_dict(network)
        self.unet = SlimUNet(self.sizes)

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Self:
        """Load from what ``save_pretrained`` wrote, with the same results, bit for bit.

        Arguments are those of ``ModelMixin.from_pretrained``.
        """
        model = super().from_pretrained(*args, **options)
        for parameter in model.parameters():
            # At its place in the file it is not aligned, and products round by alignment.
            parameter.data = parameter.data.clone()
        return model

    def forward(
        self, image: Tensor, sigma: float, parameters: Sequence[float] | None = None
    ) -> Tensor:
        """Return the clean image that the network expects, unclamped.

        Args:
            image: Noisy values in 0..1 (B, C, H, W), float32 also where the weights are in low
                precision: what the network adds is rounded, and not the image.
            sigma: Standard deviation of the noise, of values in 0..1.
            parameters: The ``noise_parameters`` other values that describe the noise. Default:
                those of Gaussian noise.

        Raises:
            UsageError: A level or a parameter is not finite, or there are too few or too many.
        """
        height, width = image.shape[-2:]
        film = modulation_at(self.unet, sigma, parameters)
        (gain, offset), (kept, rest), (made, _) = pixel_terms(self.sizes, sigma)
        noisy = pad(image, self.sizes.size)
        found = self.unet((noisy * gain + offset).to(film.dtype), film)
        clean = (noisy * kept + rest) + found.to(image.dtype) * made
        return clean[..., :height, :width]


class DenoiseScheduler(SchedulerMixin, ConfigMixin):
    """Steps of a sampler that starts at a measurement's own noise level and ends at none.

    Schedulers of diffusers start at given times and not at a level, and step whole images.

    Args:
        sampler: How the noise falls, as ``--scheduler`` of ``lowtide denoise``.
        eta: Share of ddpm's noise that ddim adds: 0 to 1.
        zero_terminal_snr: Rescale the levels of the schedule so that it ends in noise alone (arXiv
            2305.08891), for networks that predict no epsilon.
    """

    @register_to_config
    def __init__(
        self, sampler: SchedulerName = "ddim", eta: float = 0.0, zero_terminal_snr: bool = False
    ) -> None:
        if sampler not in get_args(SchedulerName):
            known = ", ".join(get_args(SchedulerName))
            raise UsageError(f"the sampler {sampler!r} is not one of {known}")
        if not 0 <= eta <= 1:
            raise UsageError(f"eta has to be 0 to 1, not {eta:g}")
        if eta and sampler != "ddim":
            raise UsageError(f"eta is for ddim, and the sampler is {sampler}")
        schedule = schedule_of(sampler)
        if zero_terminal_snr:
            schedule = NoiseSchedule(schedule.name, zero_terminal_snr=True)
        self._sampler: SchedulerName = sampler
        self._eta, self._schedule = eta, schedule
        self._zero_terminal_snr = zero_terminal_snr

    def steps(self, sigma: float, count: int, prediction: Prediction) -> list[SamplingStep]:
        """Return ``count`` steps from ``sigma``, a level of values in 0..1, to none.

        Raises `UsageError` as `sampling_steps`, and for epsilon with zero terminal SNR.
        """
        if self._zero_terminal_snr:
            self._schedule.require(prediction)
        return sampling_steps(self._sampler, sigma, count, eta=self._eta, schedule=self._schedule)
