"""Latitude and longitude as a few extra tokens beside the text.

Why not degrees in a timestep-like sinusoid: it cannot tell apart two houses of one street. Positions are projected to
metres around the data's centre, encoded as sine and cosine at wavelengths from 50 km (a city) to 10 m (a house
front), and mapped linearly to tokens of the text encoder's width.

Why a gated attention: tokens that are merely appended take part in the softmax even when they are zero, so the
pretrained path would change at step 0. Here the UNet's cross-attention attends to text and location tokens
separately, with the same weights, and adds the second scaled by a gate that starts at zero: step 0 equals the plain
path exactly, and the gate has a gradient from the first step on.
"""

import math
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

EARTH_RADIUS_M = 6_371_008.8  # mean radius, IUGG
LONGEST_M, SHORTEST_M = 50_000.0, 10.0
WAVELENGTHS = 16
FEATURES = 4 * WAVELENGTHS  # sine and cosine, east and north


class LocationDescription(msgspec.Struct, kw_only=True):
    """What two encoders must have in common, besides the weights, to be the same. Saved beside the weights."""

    tokens: int
    width: int
    centre: tuple[float, float]  # latitude, longitude in degrees
    wavelengths: int = WAVELENGTHS
    longest_m: float = LONGEST_M
    shortest_m: float = SHORTEST_M


class LocationEncoder(nn.Module):
    """`tokens` location tokens of `width` for positions around `centre` (latitude, longitude in degrees)."""

    def __init__(self, tokens: int, width: int, centre: tuple[float, float]) -> None:
        super().__init__()
        self.tokens, self.width, self.centre = tokens, width, centre
        self.linear = nn.Linear(FEATURES, tokens * width)
        self.null = nn.Parameter(torch.randn(tokens, width) * 0.02)  # stands for an unknown position
        self.gate = nn.Parameter(torch.zeros(()))
        lengths = torch.logspace(math.log10(LONGEST_M), math.log10(SHORTEST_M), WAVELENGTHS, dtype=torch.float64)
        # Not saved with the weights: it follows from constants, which LocationDescription records.
        self.register_buffer("angular", 2 * math.pi / lengths, persistent=False)

    def description(self) -> LocationDescription:
        """Return what is saved beside the weights."""
        return LocationDescription(tokens=self.tokens, width=self.width, centre=self.centre)

    def metres(self, latitude: Tensor, longitude: Tensor) -> Tensor:
        """[B] and [B] degrees -> [B, 2] metres east and north of the centre (equirectangular, float64).

        Good to about 1 % within 100 km of the centre below 60 degrees of latitude; a feature, not a survey.
        """
        north = torch.deg2rad(latitude.double() - self.centre[0])
        # To -180..180: two positions on either side of the 180th meridian are close to each other.
        wrapped = torch.remainder(longitude.double() - self.centre[1] + 180.0, 360.0) - 180.0
        east = torch.deg2rad(wrapped) * math.cos(math.radians(self.centre[0]))
        return torch.stack([east, north], dim=1) * EARTH_RADIUS_M

    def distance_m(self, latitude: float, longitude: float) -> float:
        """Return the distance from the centre. Beyond LONGEST_M / 2 the waves repeat: positions become ambiguous."""
        return float(self.metres(torch.tensor([latitude]), torch.tensor([longitude])).norm())

    def features(self, latitude: Tensor, longitude: Tensor) -> Tensor:
        """[B], [B] degrees -> [B, FEATURES] float32 in -1..1. Phases are computed in float64."""
        angular: Any = self.angular
        phase = (self.metres(latitude, longitude)[:, :, None] * angular).flatten(1)
        return torch.cat([phase.sin(), phase.cos()], dim=1).float()

    def forward(self, latitude: Tensor, longitude: Tensor, absent: Tensor | None = None) -> Tensor:
        """[B], [B] degrees, [B] bool -> [B, tokens, width]; the learned null tokens where `absent`."""
        features = self.features(latitude, longitude).to(self.linear.weight.dtype)
        tokens = self.linear(features).unflatten(1, (self.tokens, self.width))
        if absent is None:
            return tokens
        return torch.where(absent[:, None, None], self.null.to(tokens.dtype), tokens)


class GatedCrossAttention:
    """Attention processor for diffusers: text as usual, plus `gate` times attention to the last tokens.

    Covers what the SD 1.x UNet's cross-attention needs: no mask, no norms of its own, [B, S, C] states.
    """

    def __init__(self, encoder: LocationEncoder) -> None:
        self.encoder = encoder  # not registered as a submodule: its parameters belong to the encoder alone

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        assert encoder_hidden_states is not None
        assert attention_mask is None
        # Queries, keys and values as in the plain attention; the last `count` states are the location's.
        count = self.encoder.tokens
        query = _split_heads(attn.to_q(hidden_states), attn.heads)
        key = _split_heads(attn.to_k(encoder_hidden_states), attn.heads)
        value = _split_heads(attn.to_v(encoder_hidden_states), attn.heads)
        text = F.scaled_dot_product_attention(query, key[:, :, :-count], value[:, :, :-count])
        location = F.scaled_dot_product_attention(query, key[:, :, -count:], value[:, :, -count:])
        mixed = text + self.encoder.gate.to(text.dtype) * location
        joined = mixed.transpose(1, 2).flatten(2)
        # to_out holds a linear layer and a dropout, as diffusers' own processors apply them.
        return attn.to_out[1](attn.to_out[0](joined)) / attn.rescale_output_factor


def install(unet: Any, encoder: LocationEncoder) -> None:
    """Make every cross-attention of `unet` expect text states with the encoder's tokens at their end."""
    processors = dict(unet.attn_processors)
    for name in processors:
        # In each block of diffusers' UNet, attn1 is the self-attention and attn2 the cross-attention.
        if name.endswith("attn2.processor"):
            processors[name] = GatedCrossAttention(encoder)
    unet.set_attn_processor(processors)


def _split_heads(states: Tensor, heads: int) -> Tensor:
    """[B, S, C] -> [B, heads, S, C/heads]."""
    return states.unflatten(2, (heads, -1)).transpose(1, 2)
