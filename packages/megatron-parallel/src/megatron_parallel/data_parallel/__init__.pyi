from .bucket import Bucket as Bucket
from .bucket import Reduction as Reduction
from .buffers import GradientBuffers as GradientBuffers
from .plan import BUCKET_SIZE as BUCKET_SIZE
from .plan import BucketPlan as BucketPlan
from .plan import Slot as Slot
from .plan import main_dtype as main_dtype
from .plan import plan_buckets as plan_buckets
