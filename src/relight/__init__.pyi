from relight.training.job import Job as Job
from relight.training.job import init as init
from relight.training.step import Step as Step
from relight.training.training import Training as Training

__version__: str
