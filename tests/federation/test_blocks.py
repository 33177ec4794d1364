"""The most clients of a block, by kind of model."""

from torch import nn

from fedsim.federation.blocks import block_size, free_padding


def size_of(model: nn.Module, num_values: int, setting: int | str = "auto", clients: int = 10_000):
    return block_size(model, num_values, clients, setting)  # pyright: ignore[reportArgumentType]


LINEAR = nn.Linear(4, 4)


def test_the_model_sets_the_size() -> None:
    assert size_of(LINEAR, 2_410) == 128
    assert size_of(LINEAR, 101_770) == 25
    assert size_of(LINEAR, 1_000_000) == 4
    assert size_of(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten()), 2_000) == 8
    assert size_of(nn.Sequential(nn.GroupNorm(2, 4)), 2_000) == 8
    assert size_of(nn.Sequential(LINEAR, nn.LSTM(4, 4)), 2_000) == 8


def test_a_round_has_two_blocks_but_for_a_few_clients() -> None:
    assert size_of(LINEAR, 2_410, clients=100) == 50
    assert size_of(LINEAR, 101_770, clients=50) == 25
    assert size_of(LINEAR, 101_770, clients=3) == 4


def test_values_of_a_block_are_bounded() -> None:
    assert size_of(LINEAR, 5_000_000) == 3
    assert size_of(LINEAR, 50_000_000) == 1


def test_blocks_are_larger_on_a_gpu_and_may_be_a_whole_round() -> None:
    def on_gpu(num_values: int, clients: int) -> int:
        return block_size(LINEAR, num_values, clients, "auto", is_on_gpu=True)

    assert on_gpu(101_770, 1_000) == 128
    assert on_gpu(101_770, 50) == 50
    assert on_gpu(11_000_000, 1_000) == 6
    assert on_gpu(1 << 27, 1_000) == 1


def test_the_file_may_set_the_size() -> None:
    assert size_of(LINEAR, 10, "off") == 1
    assert size_of(nn.LSTM(4, 4), 50_000_000, 37) == 37


def test_padding_is_free_in_small_models_of_plain_layers() -> None:
    assert free_padding(LINEAR, 2_410) == 6_961
    assert free_padding(LINEAR, 101_770) == 164
    assert free_padding(nn.Conv2d(1, 4, 3), 2_410) == 0
    assert free_padding(nn.Conv2d(1, 4, 3), 2_410, is_on_gpu=True) == 6_961
