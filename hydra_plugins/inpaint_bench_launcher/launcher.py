"""Hydra accepts plugins only from under `hydra_plugins`; ours live in `launchers`."""

from launchers.submit import plugin, sweeper


class InpaintBenchLauncher(plugin.SweepLauncher):
    pass


class InpaintBenchSweeper(sweeper.SweepSweeper):
    pass


plugin.register()
sweeper.register()
