"""The launchers, as `meshtrain.launch`: in a checkout they lie in launch/ beside the package, in a wheel here."""
from meshtrain.shipped import shipped

__path__ = [str(shipped("launch"))]
