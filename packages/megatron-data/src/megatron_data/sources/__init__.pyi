from .block_cache import StorageCache as StorageCache
from .opening import read_texts as read_texts
