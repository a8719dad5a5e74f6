"""Launcher and sweeper under the package name that Hydra accepts plugins from; they live in `launchers`."""

from launchers.submit import plugin


class InpaintBenchLauncher(plugin.SweepLauncher):
    pass


class InpaintBenchSweeper(plugin.SweepSweeper):
    pass


plugin.register()
