from .builder import IndexedDatasetBuilder as IndexedDatasetBuilder
from .format import choose_dtype as choose_dtype
from .images import pack_image as pack_image
from .images import unpack_image as unpack_image
from .inspection import DatasetSummary as DatasetSummary
from .inspection import summarize as summarize
from .reader import IndexedDataset as IndexedDataset
