"""The inference executor ``vllm``: real vLLM, one engine a replica, in a worker process of its own."""
