"""Lines of each framework, written here after the shapes that their sources print."""

from __future__ import annotations

import math

import pytest

from davincirunsdk.steps.shapes import parse_pattern, read_line

Expected = tuple[int | None, int | None, float | None, float | None]
BAR = "|████▎     |"

LINES: dict[str, tuple[str, Expected]] = {
    "tqdm": (f" 21%{BAR} 84/400 [00:42<02:38,  2.00it/s, loss=1.25]", (84, 400, 1.25, 0.5)),
    "tqdm slow": (f"  2%{BAR} 8/400 [00:32<26:08,  4.00s/it]", (8, 400, None, 4.0)),
    "tqdm of units": (f"  2%{BAR} 8/400 [00:32<26:08,  2.00 batch/s]", (8, 400, None, 0.5)),
    "tqdm at its start": ("  0%|          | 0/400 [00:00<?, ?it/s]", (0, 400, None, None)),
    "tqdm without a total": ("84it [00:42, 2.00it/s]", (84, None, None, 0.5)),
    "tqdm scaled": (f" 12%{BAR} 1.20k/10.0k [10:00<1:13:20,  2.00it/s]", (1200, 10000, None, 0.5)),
    "tqdm in ascii": (" 21%|##1       | 84/400 [00:42<02:38,  2.00it/s]", (84, 400, None, 0.5)),
    "tqdm coloured": (
        f"\x1b[32m 21%{BAR}\x1b[0m 84/400 [00:42<02:38,  2.00it/s]\x1b[0m\x1b[A",
        (84, 400, None, 0.5),
    ),
    "tqdm several states": (
        f"  0%{BAR} 1/400 [00:00<02:38,  2.00it/s] 21%{BAR} 84/400 [00:42<02:38,  2.00it/s]",
        (84, 400, None, 0.5),
    ),
    "Lightning": (
        f"Epoch 2:  21%{BAR} 42/200 [00:21<01:19,  2.00it/s, v_num=7, train_loss=0.625, val_loss=9.9]",
        (42, 200, 0.625, 0.5),
    ),
    "Lightning rich": (
        "Epoch 2/9  ━━━━━━╸━━━━━━━━━ 42/200 0:00:21 • 0:01:19 2.00it/s v_num: 7.000 train_loss: 0.625",
        (42, 200, 0.625, 0.5),
    ),
    "HF Trainer 4": (
        "{'loss': 1.0625, 'grad_norm': 2.5, 'learning_rate': 1.9e-05, 'epoch': 0.21}",
        (None, None, 1.0625, None),
    ),
    "HF Trainer 5": (
        "{'loss': '1.0625', 'grad_norm': '2.5', 'epoch': '0.21'}",
        (None, None, 1.0625, None),
    ),
    "LLaMA-Factory": (
        (
            '{"current_steps": 20, "total_steps": 640, "loss": 0.875, "lr": 9.9e-05, "epoch": 0.31, '
            '"percentage": 3.12, "elapsed_time": "0:00:40", "remaining_time": "0:20:40"}'
        ),
        (20, 640, 0.875, None),
    ),
    "Megatron": (
        (
            " [2026-03-02 08:15:41.123456] iteration       40/    5000 | consumed samples:        40960 | "
            "elapsed time per iteration (ms): 2500.0 | learning rate: 6.0E-06 | global batch size:  1024 | "
            "lm loss: 9.125000E+00 | loss scale: 1.0 | grad norm: 3.1 | number of nan iterations:   0 |"
        ),
        (40, 5000, 9.125, 2.5),
    ),
    "Megatron nan": (
        " iteration       41/    5000 | elapsed time per iteration (ms): 2500.0 | lm loss: nan |",
        (41, 5000, math.nan, 2.5),
    ),
    "MindSpeed-MM": (
        " iteration   41/    5000 | elapsed time per iteration (ms): 2500.0 | loss: 1.5E+00 |",
        (41, 5000, 1.5, 2.5),
    ),
    "MindSpore LossMonitor": ("epoch: 3 step: 57, loss is 0.40625", (57, None, 0.40625, None)),
    "MindSpore TimeMonitor": (
        "Train epoch time: 9000.500 ms, per step time: 250.000 ms",
        (None, None, None, 0.25),
    ),
    "MindFormers": (
        (
            "2026-03-02 08:15:41,123 - mindformers[callback.py:529] - INFO - { "
            "Epoch:[  2/  3], step:[    7/   50], loss: 3.250, per_step_time: 1500ms, lr: 1e-05, "
            "overflow cond: False, loss_scale: 1.0"
        ),
        (7, 50, 3.25, 1.5),
    ),
    "MindFormers of 2024": (
        "INFO - { Epoch:[  2/  3], step:[    7/   50], loss:[3.250/3.500], time:1500.0 ms, lr:1e-05",
        (7, 50, 3.25, 1.5),
    ),
    "MindFormers, new trainer": (
        "{ step:[    7/   50], loss:   3.250000, per_step_time:   1500ms, load_balancing_loss:   1.093977 }",
        (7, 50, 3.25, 1.5),
    ),
    "MindFormers, not the last stage": (
        "{ step:[    7/   50], loss: N/A (only on the last stage), per_step_time:   1500ms }",
        (7, 50, None, 1.5),
    ),
    "DeepSpeed": (
        (
            "[2026-03-02 08:15:41,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=30, skipped=1, "
            "lr=[0.0001], mom=[(0.9, 0.95)]"
        ),
        (30, None, None, None),
    ),
    "DeepSpeed timer": (
        (
            "[INFO] [timer.py:260:stop] epoch=0/micro_step=120/global_step=30, RunningAvgSamplesPerSec=12.5, "
            "CurrSamplesPerSec=12.1, MemAllocated=4.32GB"
        ),
        (30, None, None, None),
    ),
    "verl": (
        "(TaskRunner pid=4711) step:12 - actor/pg_loss:-0.125 - critic/vf_loss:8.0 - timing_s/step:30.5",
        (12, None, -0.125, 30.5),
    ),
    "verl of numpy 2": (
        "step:12 - actor/pg_loss:np.float64(-0.125) - timing_s/step:30.5",
        (12, None, -0.125, 30.5),
    ),
    "mmengine by epoch": (
        (
            "03/02 08:15:41 - mmengine - INFO - Epoch(train) [2][10/25]  lr: 1.0000e-02  eta: 0:00:12  "
            "time: 0.2500  data_time: 0.0004  memory: 100  loss: 1.7500"
        ),
        (10, 25, 1.75, 0.25),
    ),
    "mmengine": (
        "mmengine - INFO - Iter(train) [ 50/1000]  eta: 1 day, 0:03:57  time: 0.2500  loss: 1.7500",
        (50, 1000, 1.75, 0.25),
    ),
    "mmcv": (
        "mmdet - INFO - Epoch [2][50/900]\tlr: 1.0e-03, eta: 0:12:01, time: 0.250, loss: 1.75",
        (50, 900, 1.75, 0.25),
    ),
    "ultralytics": (
        (
            f"   17/100      9.62G     0.6250     0.5566      1.005         72        960: 100%{BAR} 29/294 "
            "[00:14<02:13,  2.00it/s]"
        ),
        (29, 294, 0.625, 0.5),
    ),
    "Keras 3": (
        "156/312 ━━━━━━━━━━━━━━━━━━━━ 3s 20ms/step - accuracy: 0.91 - loss: 0.3125",
        (156, 312, 0.3125, 0.02),
    ),
    "Keras 3 coloured": (
        (
            "\x1b[1m156/312\x1b[0m \x1b[32m━━━━━━━━━━\x1b[0m\x1b[37m━━━━━━━━━━\x1b[0m "
            "\x1b[1m3s\x1b[0m 20ms/step - loss: 0.3125"
        ),
        (156, 312, 0.3125, 0.02),
    ),
    "Keras, a line an epoch": (
        "312/312 - 6s - 20ms/step - accuracy: 0.9 - loss: 0.3125",
        (312, 312, 0.3125, 0.02),
    ),
    "Keras 2": (
        "156/312 [==============>...............] - ETA: 3s - loss: 0.3125",
        (156, 312, 0.3125, None),
    ),
    "Keras 2 at the end": (
        "312/312 [==============================] - 6s 20ms/step - loss: 0.3125 - val_loss: 0.5",
        (312, 312, 0.3125, 0.02),
    ),
    "own loop": ("Epoch [2/5], Step [300/600], Loss: 0.1875", (300, 600, 0.1875, None)),
    "own loop of words": ("step 300 loss 0.1875 lr 1e-4", (300, None, 0.1875, None)),
    "torchtitan": (
        "[rank0]:step:  3  loss:  8.1250  grad_norm:  1.2  memory: 10.3GiB(10%)",
        (3, None, 8.125, None),
    ),
    "torch example": ("Train Epoch: 2 [640/60000 (1%)]\tLoss: 2.125000", (640, 60000, 2.125, None)),
    "timm": ("Train: 2 [  50/1251 (  4%)]  Loss: 6.875 (6.90)  Time: 0.345s", (50, 1251, 6.875, None)),
    "own loop without a loss": ("finished step 7/100", (7, 100, None, None)),
}

OTHERS = [
    f"Validation DataLoader 0:  45%{BAR} 90/200 [00:30<00:37,  2.97it/s]",
    f"Sanity Checking DataLoader 0:  50%{BAR} 1/2 [00:00<00:00,  2.97it/s]",
    f"Evaluating:  45%{BAR} 90/200 [00:30<00:37,  2.97it/s]",
    f"Loading checkpoint shards: 100%{BAR} 4/4 [00:10<00:00,  2.58s/it]",
    f"Map (num_proc=8):  45%{BAR} 90000/200000 [00:30<00:37,  2970.00 examples/s]",
    f"model.safetensors:  30%{BAR} 1.05G/4.20G [00:10<00:30, 100MB/s]",
    f"  Class   Images  Instances   Box(P   R   mAP50): 100%{BAR} 4/4 [00:00<00:00,  5.58it/s]",
    "mmengine - INFO - Epoch(val) [1][10/25]  eta: 0:00:00  time: 0.1",
    "{'eval_loss': 0.75, 'eval_runtime': 3.25, 'epoch': 1.0}",
    " validation loss at iteration 1000 | lm loss value: 7.5E+00 | lm loss PPL: 1.8E+03 |",
    "Validation step 10/100 loss: 0.5",
    "step 3: loading the data",
    "loss of precision in 3 steps",
    "2026-03-02 08:15:41 rank 3 listens on 127.0.0.1:60001",
    "Traceback (most recent call last):",
    "",
]


@pytest.mark.parametrize(("line", "expected"), LINES.values(), ids=list(LINES))
def test_a_line_is_read(line: str, expected: Expected) -> None:
    """Step, total, loss and time per step of each framework's line, also behind another's words."""
    for text in (line, f"{line}   ", f"[rank1]: {line}"):
        reading = read_line(text)
        assert reading is not None
        found = (reading.step, reading.total, reading.loss, reading.step_seconds)
        assert found == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("line", OTHERS)
def test_other_lines_are_left_alone(line: str) -> None:
    """Evaluation, loading and everything else is no step."""
    assert read_line(line) is None


@pytest.mark.parametrize(
    "line", ["loss" + " " * 200_000, "step " * 40_000, "1" * 200_000, "| " * 100_000 + "[ loss"]
)
def test_no_line_is_too_long(line: str) -> None:
    """A line costs a bounded time, whatever is in it."""
    import time

    began = time.process_time()
    read_line(line)
    assert time.process_time() - began < 2.0


def test_own_pattern() -> None:
    """A user's expression comes first, with names or without."""
    named = parse_pattern(r"it=(?P<step>\d+) of (?P<total>\d+) L=(?P<loss>\S+)")
    reading = read_line("it=5 of 9 L=0.25 step 3 loss 7", (named,))
    assert reading is not None
    assert (reading.step, reading.total, reading.loss) == (5, 9, 0.25)
    reading = read_line("done (5) | 9", (parse_pattern(r"\((\d+)\) \| (\d+)"),))
    assert reading is not None
    assert (reading.step, reading.total) == (5, 9)


@pytest.mark.parametrize("text", ["(", r"(?P<loss>\d+)", "step", r"(\d)(\d)(\d)"])
def test_own_pattern_is_checked(text: str) -> None:
    """A wrong expression is refused with an example of a right one."""
    with pytest.raises(ValueError, match=r"progress pattern .*such as"):
        parse_pattern(text)
