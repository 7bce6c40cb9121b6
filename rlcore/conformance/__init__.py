"""The contracts of devices and of executors as tests that anyone can run on their own.

    pytest --pyargs rlcore.conformance --device NAME [--require ipc,pool] [--conformance-json FILE]
    pytest --pyargs rlcore.conformance --train-executor NAME [--device NAME] [--require save,...]
    pytest --pyargs rlcore.conformance --inference-executor NAME [--model FOLDER] [--device NAME] [--require submit,...]

A plugin that passes is a device, or an executor, of rlcore. See docs/plugins.md.
"""
