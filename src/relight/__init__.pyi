from relight.training.job import Job as Job
from relight.training.job import init as init
from relight.training.step import Step as Step
from relight.training.training import Training as Training
from relight.transfer.engine.receiver import Receiver as Receiver
from relight.transfer.publish.publisher import Publisher as Publisher
from relight.transfer.tensors.lent_weights import LentWeights as LentWeights
from relight.transfer.tensors.weights import TensorSource as TensorSource
from relight.transfer.tensors.weights import digest_weights as digest_weights
from relight.transfer.tensors.weights import weights_of as weights_of

__version__: str
