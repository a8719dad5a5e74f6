from launchers.plugin import SweepLauncher, register


class InpaintBenchLauncher(SweepLauncher):
    pass


register()
