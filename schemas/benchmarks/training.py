"""Benchmarks that train a network, run inference with one, or measure a part of training."""

from __future__ import annotations

from collections.abc import Mapping

from schemas.benchmarks import BACKENDS, DATA_SETS, DTYPES, THROTTLE_REASONS, Benchmark, Cost, Output, make_outputs

_NETWORKS = ("convnet", "resnet18")
_DIRECTORIES = ["/usr/share/datasets"]

TRAINING: Mapping[str, Benchmark] = {
    "training": Benchmark(
        group="training",
        title="Training",
        summary="data-parallel training: whether the loss falls, accuracy, speed",
        settings={
            "networks": [*_NETWORKS],
            "epochs": 2,
            "batch_size": 128,
            "learning_rate": 0.01,
            "max_steps": 0,
            "data_directories": _DIRECTORIES,
        },
        outputs=make_outputs(
            "training",
            {
                "throughput": "images/s",
                "step_time": "s",
                "loss": "1",
                "loss_ratio": "1",
                "loss_finite": "1",
                "accuracy": "1",
            },
            "world",
            over={"network": "networks"},
        ),
        params={"backend": BACKENDS, "batch_size": int, "data": DATA_SETS, "epochs": int, "world_size": int},
        cpu_settings={"networks": ["convnet"], "max_steps": 20},
        cost_s=1.1,
        costs=[Cost(seconds=0.9, over=["epochs"])],
        parts=["compute", "CPU"],
        needs_group=True,
        trains=True,
    ),
    "fashion_mnist": Benchmark(
        group="training",
        title="Fashion-MNIST",
        summary="the training of the GKE experiment (docs/scaling.md) at the speed of the GPUs: data on the device, CUDA graphs",
        settings={
            "epochs": 20,
            "batch_size": 128,
            "learning_rate": 0.01,  # of one rank; multiplied by the world size, up to MAX_RATE of the benchmark's module
            "max_steps": 0,  # 0: no limit
            "data_directories": _DIRECTORIES,
        },
        outputs=[
            *make_outputs("fashion_mnist", {"accuracy": "1", "duration": "s", "throughput": "images/s"}, "world"),
            Output(name="fashion_mnist.wrong_parameters", unit="1", scope="world", demanded=False),
        ],
        params={
            "batch_size": int,
            "data": DATA_SETS,
            "epochs": float,  # number trained: less than the setting if max_steps ends the training
            "graphed": bool,
            "learning_rate": float,
            "world_size": int,
        },
        adapted=["learning_rate"],
        cpu_settings={"epochs": 1, "max_steps": 20},
        cost_s=0.1,
        costs=[Cost(seconds=0.045, over=["epochs"])],
        parts=["compute", "NVLink"],
        needs_group=True,
        trains=True,
    ),
    "variants": Benchmark(
        group="training",
        title="Training variants",
        summary="ResNet-18 training steps in several precisions, memory layouts and batch sizes, eager and compiled",
        settings={
            "variants": ["fp32", "bf16", "fp16", "bf16_channels_last"],
            "batch_sizes": [128, 1024],
            "compiled_variants": ["bf16_channels_last_compiled"],
            "compiled_batch_sizes": [128],  # the compiler needs half a minute for each batch size
            "steps": 30,
        },
        outputs=[
            output
            for over in (
                {"variant": "variants", "batch_size": "batch_sizes"},
                {"variant": "compiled_variants", "batch_size": "compiled_batch_sizes"},
            )
            for output in make_outputs("variants", {"throughput": "images/s", "loss_finite": "1"}, "world", over=over)
        ],
        params={"data": DATA_SETS, "graphed": bool, "world_size": int},
        cpu_settings={"variants": ["fp32"], "batch_sizes": [16], "compiled_variants": [], "steps": 3},
        cost_s=0.0,
        costs=[
            Cost(seconds=1.1, over=["variants", "batch_sizes"]),
            Cost(seconds=38.0, over=["compiled_variants", "compiled_batch_sizes"]),
        ],
        parts=["compute"],
        needs_group=True,
        trains=True,
    ),
    "checkpoint": Benchmark(
        group="training",
        title="Checkpoint",
        summary="a checkpoint is saved, restored by all ranks and compared bit by bit, and the training continues from it",
        settings={"steps": 5, "batch_size": 32},
        outputs=make_outputs("checkpoint", {"identical": "1", "save_time": "s", "restore_time": "s"}, "world"),
        params={"batch_size": int, "network": _NETWORKS, "optimizer": str, "steps": int, "world_size": int},
        cost_s=0.4,
        parts=["disk"],
        needs_group=True,
        trains=True,
    ),
    "model_parallel": Benchmark(
        group="training",
        title="Model parallel",
        summary="training of a network that is split over two devices, with data-parallel replicas",
        settings={"steps": 20, "batch_size": 256, "width": 8192},
        outputs=[
            *make_outputs("model_parallel", {"step_time": "s", "loss_ratio": "1"}, "world"),
            Output(name="model_parallel.wrong_losses", unit="1", scope="world", demanded=False),
        ],
        params=dict.fromkeys(("batch_size", "left_out", "replicas", "steps", "width", "world_size"), int),
        cpu_settings={"width": 128, "batch_size": 32},
        cost_s=0.3,
        parts=["NVLink"],
        needs_peers=True,
        needs_group=True,
        trains=True,
    ),
    "transformer": Benchmark(
        group="training",
        title="Transformer",
        summary="transformer blocks sharded by FSDP2 and sized to the GPU: step time, tokens, model FLOP utilization, memory",
        settings={"layers": 8, "width": 4096, "heads": 32, "sequence": 2048, "batch_size": 4, "steps": 8},
        outputs=[
            *make_outputs("transformer", {"step_time": "s", "throughput": "tokens/s", "flops": "FLOP/s"}, "world"),
            Output(name="transformer.mfu", unit="1", scope="world", gpu_only=True),
            Output(name="transformer.loss_ratio", unit="1", scope="world"),
            Output(name="transformer.wrong_losses", unit="1", scope="world", demanded=False),
            Output(name="transformer.memory_peak", unit="B", scope="device", gpu_only=True),
        ],
        params={
            "data": DATA_SETS,
            "dtype": DTYPES,
            "peak": str,
            **dict.fromkeys(("batch_size", "heads", "layers", "sequence", "width", "world_size"), int),
        },
        adapted=["layers"],  # fewer on a GPU with little memory
        cpu_settings={"layers": 2, "width": 64, "heads": 4, "sequence": 32, "batch_size": 2},
        cost_s=3.2,
        costs=[Cost(seconds=0.13, over=["steps"])],
        parts=["compute", "GPU memory", "NVLink"],
        needs_group=True,
        trains=True,
    ),
    "mixture_of_experts": Benchmark(
        group="training",
        title="Mixture of experts",
        summary="a transformer with two of eight experts for each token, sharded by FSDP2: step time, tokens, utilization",
        settings={"layers": 4, "width": 2048, "heads": 16, "sequence": 2048, "batch_size": 4, "steps": 8},
        outputs=[
            *make_outputs(
                "mixture_of_experts",
                {"step_time": "s", "throughput": "tokens/s", "loss_finite": "1", "loss_ratio": "1"},
                "world",
            ),
            Output(name="mixture_of_experts.mfu", unit="1", scope="world", gpu_only=True),
        ],
        params={
            "dtype": DTYPES,
            "peak": str,
            **dict.fromkeys(("batch_size", "heads", "layers", "sequence", "width", "world_size"), int),
        },
        adapted=["layers"],  # fewer on a GPU with little memory
        cpu_settings={"layers": 1, "width": 32, "heads": 2, "sequence": 16, "batch_size": 2, "steps": 4},
        cost_s=1.0,
        costs=[Cost(seconds=0.1, over=["steps"])],
        parts=["compute", "GPU memory", "NVLink"],
        needs_group=True,
        trains=True,
    ),
    "inference": Benchmark(
        group="training",
        title="Inference",
        summary="a decoder with a full KV cache: prefill and decoding rates, latencies, and whether equal prompts give equal "
        "tokens",
        settings={
            "layers": 8,
            "width": 4096,
            "heads": 32,
            "prompt": 2048,
            "steps": 1000,  # tokens decoded after each prompt; with fewer, a single outlier would be the p99.9
            "share": 0.8,  # share of the free memory that keys and values fill
            "most_bytes": 0,  # upper limit of keys and values; 0: no limit
            "seconds": 20.0,
            "first_percentiles": ["p50", "p99"],
            "percentiles": ["p50", "p99", "p99_9"],
        },
        outputs=[
            *make_outputs("inference", {"prefill_throughput": "tokens/s", "decode_throughput": "tokens/s"}, "device"),
            Output(name="inference.first_token", unit="s", scope="device", over={"percentile": "first_percentiles"}),
            Output(name="inference.token_interval", unit="s", scope="device", over={"percentile": "percentiles"}),
            *make_outputs("inference", {"wrong_tokens": "1", "cache_share": "1"}, "device"),
        ],
        params={"dtype": DTYPES, "graphed": bool},
        choices={"first_percentiles": ["p50", "p99", "p99_9"]},
        cpu_settings={
            "layers": 2,
            "width": 64,
            "heads": 4,
            "prompt": 16,
            "steps": 16,
            "most_bytes": 1 << 18,
            "seconds": 0.2,
            "first_percentiles": ["p50"],
            "percentiles": ["p50"],
        },
        cost_s=19.0,
        costs=[Cost(timed=["seconds"])],
        parts=["compute", "GPU memory", "CPU"],
    ),
    "loss_curve": Benchmark(
        group="training",
        title="Loss curve",
        summary="the losses of a short training on each device, compared with the same training in fp64 on a CPU",
        settings={
            "dtypes": ["fp32", "bf16"],
            "layers": 2,
            "width": 128,
            "heads": 4,
            "sequence": 64,
            "batch_size": 4,
            "steps": 40,
        },
        outputs=make_outputs("loss_curve", {"deviation": "1", "wrong_losses": "1"}, "device", over={"dtype": "dtypes"}),
        params={"steps": int},
        cpu_settings={"width": 32, "heads": 2, "sequence": 16, "steps": 10},
        cost_s=2.0,
        parts=["compute"],
    ),
    "overlap": Benchmark(
        group="collectives",
        title="Overlap",
        summary="an all_reduce at the same time as matrix products: how much of the time of the shorter operation is saved, and "
        "how much the longer operation slows down",
        settings={"size": 8192, "size_bytes": 1 << 30, "repetitions": 10},
        outputs=make_outputs("overlap", {"hidden_share": "1", "slowdown": "1"}, "world"),
        params={"dtype": ("bfloat16", "float32"), "size": int, "size_bytes": int, "world_size": int},
        cpu_settings={"size": 256, "size_bytes": 1 << 20},
        cost_s=0.3,
        parts=["compute", "NVLink"],
        needs_peers=True,
        needs_group=True,
    ),
    "dataloader": Benchmark(
        group="training",
        title="Data loading",
        summary="rate at which the host's CPUs prepare images for each rank, compared with the device's training rate",
        settings={"workers": [1, 2, 4, 8], "batch_size": 256, "seconds": 1.0},
        outputs=[
            Output(name="dataloader.throughput", unit="images/s", scope="device", over={"workers": "workers"}),
            Output(name="dataloader.sufficiency", unit="1", scope="device"),
        ],
        params={"batch_size": int, "cpus_per_rank": float, "network": _NETWORKS},
        cpu_settings={"workers": [1], "batch_size": 64},
        cost_s=6.7,
        costs=[Cost(seconds=0.2, timed=["seconds"], over=["workers"]), Cost(seconds=1.0, per="further_gpu")],
        parts=["CPU"],
    ),
    "straggler": Benchmark(
        group="training",
        title="Stragglers",
        summary="data-parallel training steps: how long each rank computes and waits, with its GPU clocks and CPU time",
        settings={
            "layers": 4,
            "width": 1024,
            "heads": 16,
            "sequence": 1024,
            "batch_size": 16,
            "seconds": 3.0,
            "reasons": [*THROTTLE_REASONS],
        },
        outputs=[
            *make_outputs("straggler", {"compute": "s", "wait": "s", "cpu_time": "s"}, "device"),
            Output(name="straggler.launch", unit="s", scope="device", gpu_only=True),
            *make_outputs("straggler", {"last_share": "1", "preemptions": "1"}, "device"),
            *make_outputs("straggler", {"step_time": "s", "communication": "s"}, "world"),
            *make_outputs(
                "straggler",
                {"cpus": "1", "cpu_wait": "s", "cpu_pressure": "1", "cpu_throttled_share": "1"},
                "device",
                demanded=False,
            ),
            *make_outputs(
                "straggler", {"power": "W", "clock": "Hz", "temperature": "Cel"}, "device", gpu_only=True, sampled=True
            ),
            Output(
                name="straggler.throttled_share",
                unit="1",
                scope="device",
                over={"reason": "reasons"},
                gpu_only=True,
                sampled=True,
            ),
        ],
        params={
            "dtype": ("bfloat16", "float16", "float32"),
            "samples_per_second": float,
            **dict.fromkeys(("batch_size", "layers", "sequence", "width"), int),
        },
        cpu_settings={"layers": 2, "width": 64, "heads": 4, "sequence": 32, "batch_size": 4, "seconds": 0.5},
        cost_s=1.7,
        costs=[Cost(timed=["seconds"])],
        parts=["compute", "CPU", "NVLink"],
        needs_peers=True,
        needs_group=True,
        trains=True,
    ),
    "scaling": Benchmark(
        group="training",
        title="Scaling",
        summary="training for a scaling study, as in the GKE experiment (docs/scaling.md): DDP, and images prepared by the CPUs",
        settings={
            "epochs": 1,
            "batch_size": 64,
            "precision": "fp32",
            "workers": 0,  # processes of each rank that prepare its images; 0: the rank itself prepares them
            "learning_rate": 0.01,
            "max_steps": 0,  # 0: no limit
            "data_directories": _DIRECTORIES,
        },
        choices={"precision": ["fp32", "bf16"]},
        outputs=make_outputs(
            "scaling",
            {"hookup": "s", "duration": "s", "throughput": "images/s", "accuracy": "1", "loss": "1"},
            "world",
        ),
        params={
            "backend": BACKENDS,
            "data": DATA_SETS,
            "precision": ("fp32", "bf16"),
            **dict.fromkeys(("batch_size", "cpus", "epochs", "max_steps", "workers", "world_size"), int),
        },
        cpu_settings={"max_steps": 20},
        cost_s=8.0,
        parts=["compute", "CPU"],
        needs_group=True,
        trains=True,
    ),
}
