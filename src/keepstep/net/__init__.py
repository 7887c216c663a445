"""The network of a job: the plugin's environment, and what NCCL itself does for RDMA."""
