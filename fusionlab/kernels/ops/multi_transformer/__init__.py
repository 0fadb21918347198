"""A row of transformer layers as one op."""

from .op import MULTI_TRANSFORMER as MULTI_TRANSFORMER
from .public import multi_transformer as multi_transformer
from .weights import TransformerLayer as TransformerLayer
from .weights import pack_keys as pack_keys
from .weights import pack_qkv as pack_qkv
from .weights import pack_qkv_bias as pack_qkv_bias
from .weights import rotary_tables as rotary_tables
from .weights import unpack_keys as unpack_keys
from .weights import unpack_qkv as unpack_qkv
from .weights import unpack_qkv_bias as unpack_qkv_bias
