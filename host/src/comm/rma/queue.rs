//! Queues: windows with rings, which kernels use to send batches of rows.

use fusewire_device::DType;
use fusewire_device::window::{QUEUE_SIGNALS, queue_elements};

use super::create::Rings;
use super::register::dtype_name;
use super::{Window, WindowOptions};
use crate::Result;
use crate::comm::Communicator;
use crate::comm::submit::invalid;

/// A queue for kernels ([`fusewire_device::Queue`]). It has a ring of rows from every block of
/// every rank to the same block of every rank.
///
/// The communicator's ranks create it together, and only kernels on that communicator may use it.
/// Create a new queue after [`Communicator::reconfigure`].
#[derive(Clone, Debug)]
pub struct Queue {
    window: Window,
    rings: Rings,
}

impl Queue {
    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.window.tensor().dtype()
    }

    /// Returns the number of elements of a row.
    pub fn width(&self) -> usize {
        self.rings.width as usize
    }

    /// Returns the greatest number of rows that a block can send to a rank at once.
    pub fn batch(&self) -> usize {
        self.rings.rows as usize / 4
    }

    /// Returns the bytes of memory that this rank holds for the queue.
    pub fn bytes(&self) -> usize {
        self.window.tensor().len() * self.dtype().size()
    }

    /// Frees the queue. All ranks must call this together. Waits until no operation of any rank
    /// uses it. A queue that is not freed lives as long as the communicator.
    ///
    /// # Errors
    /// The communicator's failure, if it has failed. The memory is then not freed.
    pub fn free(self) -> Result<()> {
        self.window.free()
    }

    /// Returns the window with the rings.
    pub(in crate::comm) fn window(&self) -> &Window {
        &self.window
    }
}

impl Communicator {
    /// Allocates a queue for rows of `width` elements. A block sends up to `batch` rows at once to
    /// each rank; `batch` is rounded up to a power of two that is at least 4. All ranks must call
    /// this together.
    ///
    /// Each rank allocates memory for four batches from each block of each rank
    /// ([`Options::blocks`](crate::Options::blocks)).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the backend has no windows, or
    /// if `width` or `batch` is 0 or too large;
    /// [`Error::Communicator`](crate::Error::Communicator) if the ranks pass different arguments;
    /// and the errors of [`Communicator::new_window`] and [`Tensor::new`](crate::Tensor::new).
    pub fn alloc_queue(&self, dtype: DType, width: usize, batch: usize) -> Result<Queue> {
        let refuse = |detail: String| Err(invalid("alloc_queue", detail));
        if !self.supports_window() {
            return refuse(format!("backend {} has no windows", self.backend()));
        }
        let mine = [dtype as u64, width as u64, batch as u64];
        self.outside_capture()?
            .agree("alloc_queue", [], &mine, |words| {
                let dtype = dtype_name(words[0]);
                format!("batches of {} rows of {} {dtype}", words[2], words[1])
            })?;
        if width == 0 || batch == 0 {
            return refuse(format!(
                "batches of {batch} rows of {width} elements; both must be at least 1"
            ));
        }
        let blocks = self.options().blocks;
        let rows = batch.max(4).checked_next_power_of_two();
        let rings = rows
            .and_then(|rows| rows.checked_mul(4))
            .and_then(|rows| u32::try_from(rows).ok())
            .zip(u32::try_from(width).ok())
            .map(|(rows, width)| Rings { rows, width });
        let elements = rings.and_then(|Rings { rows, width }| {
            queue_elements(self.size(), blocks, rows, width, dtype.size())
        });
        let (Some(rings), Some(elements)) = (rings, elements) else {
            return refuse(format!(
                "batches of {batch} rows of {width} elements are too large"
            ));
        };
        let options = WindowOptions {
            signals: Some(QUEUE_SIGNALS),
            counters: Some(0),
            barriers: 0,
            cells: 0,
        };
        let tensor = self.tensor(dtype, elements);
        let window = self.make_window("alloc_queue", (dtype, elements), tensor, options, rings)?;
        Ok(Queue { window, rings })
    }
}
