"""Methods other than forward: registered ones gather and free like forward; unregistered ones meet sharded
parameters.
"""

import pytest
import torch
from torch import nn

from harness import (
    OURS,
    assert_same_model,
    backward_of_all_ranks,
    is_sharded,
    processes,
    randn,
    seeded,
    shard,
    subject,
    threads,
)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(3, 16, kernel_size=4, stride=4)

    def features(self, images):
        return self.proj(images).flatten(2).transpose(1, 2)

    def forward(self, images):
        return self.features(images).sum(dim=1)


class Model(nn.Module):
    """Calls a method of its encoder, not its forward."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(16, 5)

    def forward(self, images):
        return self.head(self.encoder.features(images))


def _registered(register):
    model, reference = seeded(Model), seeded(Model)
    shard(model, (model.encoder, model.head))
    register(model.encoder, "features")
    for step in range(2):
        want = backward_of_all_ranks(reference, lambda m, r: m(randn(2, 3, 8, 8, step=step, of_rank=r)).square().mean())
        loss = model(randn(2, 3, 8, 8, step=step)).square().mean()
        torch.testing.assert_close(loss.detach(), want)
        loss.backward()
        assert_same_model(model, reference)
        model.zero_grad()
        reference.zero_grad()
        assert is_sharded(model.encoder.parameters())


def _registered_by_subject():
    _registered(subject().register_fsdp_forward_method)


def test_registered_method_trains():
    processes(2, _registered_by_subject)


def test_torchs_own_registration_works_on_the_subjects_modules():
    """transformers calls it for `generate`, on whatever is an FSDPModule."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    threads(2, _registered, register_fsdp_forward_method)


def test_registration_on_a_plain_module_does_nothing():
    def body():
        encoder = Encoder()
        subject().register_fsdp_forward_method(encoder, "features")
        assert encoder.features(randn(1, 3, 8, 8)).shape == (1, 4, 16)

    threads(1, body)


def test_unregistered_method_meets_sharded_parameters():
    def body():
        model = seeded(Model)
        shard(model, (model.encoder, model.head))
        with pytest.raises(Exception) as error:
            model(randn(2, 3, 8, 8))
        if OURS:
            assert "gather" in str(error.value).lower(), "the error says what to do"

    threads(2, body)
