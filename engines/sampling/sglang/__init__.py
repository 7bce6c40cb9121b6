"""The inference executor ``sglang``: real SGLang, one engine a replica, driven from a worker process of its own."""
