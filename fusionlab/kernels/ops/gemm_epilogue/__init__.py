"""act(x @ w + bias) as one op."""

from .activations import ACTIVATIONS as ACTIVATIONS
from .activations import Activation as Activation
from .op import GEMM_EPILOGUE as GEMM_EPILOGUE
from .op import gemm_epilogue as gemm_epilogue
