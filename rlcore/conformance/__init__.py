"""The contracts of a device as tests that anyone can run on their own device.

    pytest --pyargs rlcore.conformance --device NAME [--require ipc,pool] [--conformance-json FILE]

A plugin that passes is a device of rlcore. See docs/plugins.md.
"""
