"""A fork server for the processes of tests that load torch: `server` has loaded it, and forks for each of them.

`python -m launchers.entry` and the like take seven seconds of a core to import torch and diffusers. `site` holds the
`sitecustomize` that Python imports at its start, because tests/conftest.py puts that folder on PYTHONPATH; it hands the
program to the server, and stands for the forked process: it passes signals on and ends as that process ends. If it is
killed, the server kills the forked process. What multiprocessing spawns there, as the ranks of a run, is a fork too.
Tests of what such processes cannot show ask for `real_processes`.
"""
