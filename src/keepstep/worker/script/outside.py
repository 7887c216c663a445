"""Packages whose objects are about this process and the world outside.

What they hold must not come from another process: it belongs to a connection, a screen, a device or
memory of C code. Objects of other installed packages are looked into (graph.py).
"""

from __future__ import annotations

from typing import Final

_TRACKERS = "aim clearml comet_ml mlflow neptune swanlab tensorboard tensorboardX trackio wandb"
_SHOWN = "IPython PIL cv2 ipykernel loguru matplotlib rich structlog tqdm"
_CONNECTIONS = (
    "aiohttp azure boto3 botocore fsspec gcsfs git google grpc httpcore httpx huggingface_hub "
    "kubernetes opentelemetry paramiko prometheus_client psycopg psycopg2 pymongo redis requests "
    "s3fs sentry_sdk smart_open sqlalchemy urllib3 websocket websockets zmq"
)
_PROCESSES = "dask docker multiprocess pexpect psutil pynvml ray"
_TABLES = "apache_beam datasets h5py lmdb pandas polars pyarrow tensorflow tokenizers triton"
_TESTS = "_pytest pluggy pytest"

PACKAGES: Final = frozenset(
    " ".join((_TRACKERS, _SHOWN, _CONNECTIONS, _PROCESSES, _TABLES, _TESTS)).split()
)
