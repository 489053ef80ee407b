//! Graphs, instantiated graphs, and the user objects that graphs own.

use core::any::Any;
use core::ffi::c_void;
use core::fmt;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;

use fusewire::cpu;

use super::context::{Context, callback};
use super::handles::{EXECS, GRAPHS, USER_OBJECTS, fresh};
use super::stream::Stream;
use super::{capture, lock};
use crate::status::{Result, Status};

/// A user function. Its argument is the user's data pointer.
pub(crate) type Callback = unsafe extern "C" fn(*mut c_void);

/// A captured graph, or the graph of an active capture.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) handle: usize,
    pub(crate) context: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// `None` during the capture.
    graph: Option<cpu::CpuGraph>,
    nodes: Vec<usize>,
    references: References,
    keep: Vec<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State")
            .field("graph", &self.graph)
            .field("references", &self.references)
            .finish_non_exhaustive()
    }
}

/// References to user objects, released on drop.
#[derive(Debug, Default)]
struct References(Vec<(Arc<UserObject>, u32)>);

impl Clone for References {
    fn clone(&self) -> Self {
        for (object, count) in &self.0 {
            object.add(*count);
        }
        Self(self.0.clone())
    }
}

impl Drop for References {
    fn drop(&mut self) {
        for (object, count) in &self.0 {
            // `release` cannot fail, because `retain` counted these references.
            let _ = object.release(*count);
        }
    }
}

/// A user object. Its destructor runs when the last reference to it is released.
#[derive(Debug)]
pub(crate) struct UserObject {
    handle: usize,
    references: Mutex<u32>,
    destroy: Callback,
    data: usize,
}

/// An instantiated graph.
pub(crate) struct Exec {
    pub(crate) context: usize,
    graph: cpu::CpuGraphExec,
    /// Completion of the latest launch. The next launch of the graph waits for it.
    last: cpu::CpuEvent,
    _references: References,
    _keep: Vec<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for Exec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exec")
            .field("graph", &self.graph)
            .finish_non_exhaustive()
    }
}

impl Graph {
    /// Creates the graph of an active capture.
    pub(crate) fn growing(context: usize) -> Arc<Self> {
        Arc::new(Self {
            handle: fresh(),
            context,
            state: Mutex::default(),
        })
    }

    /// Sets the content of the graph when its capture ends.
    pub(crate) fn finish(&self, graph: cpu::CpuGraph, nodes: Vec<usize>) {
        let mut state = lock(&self.state);
        state.graph = Some(graph);
        state.nodes = nodes;
    }

    pub(crate) fn nodes(&self) -> Vec<usize> {
        lock(&self.state).nodes.clone()
    }

    /// Keeps an object alive as long as the graph, its clones and its instances.
    fn keep(&self, object: Arc<dyn Any + Send + Sync>) {
        lock(&self.state).keep.push(object);
    }

    /// Adds references to a user object. If `own` is false, takes over references of the caller
    /// instead.
    pub(crate) fn retain(&self, object: Arc<UserObject>, count: u32, own: bool) -> Result<()> {
        if count == 0 {
            return Err(Status::InvalidValue);
        }
        if own {
            object.add(count);
        } else if *lock(&object.references) < count {
            return Err(Status::InvalidValue);
        }
        lock(&self.state).references.0.push((object, count));
        Ok(())
    }

    /// Releases the graph's references to a user object.
    pub(crate) fn release(&self, object: &Arc<UserObject>, count: u32) -> Result<()> {
        let mut state = lock(&self.state);
        let held = &mut state.references.0;
        let found = held
            .iter_mut()
            .find(|(other, held)| Arc::ptr_eq(other, object) && *held >= count);
        let (_, left) = found.ok_or(Status::InvalidValue)?;
        *left -= count;
        held.retain(|(_, count)| *count > 0);
        drop(state);
        object.release(count)
    }

    /// Instantiates the graph. Returns the handle of the instance.
    pub(crate) fn instantiate(&self) -> Result<usize> {
        let state = lock(&self.state);
        let graph = state.graph.as_ref().ok_or(Status::InvalidValue)?;
        let exec = Exec {
            context: self.context,
            graph: graph.instantiate().or(Err(Status::Unknown))?,
            last: cpu::CpuEvent::new(),
            _references: state.references.clone(),
            _keep: state.keep.clone(),
        };
        Ok(EXECS.insert(Arc::new(exec)))
    }

    /// Clones the graph. Returns the handle of the clone.
    pub(crate) fn duplicate(&self) -> Result<usize> {
        let state = lock(&self.state);
        if state.graph.is_none() {
            return Err(Status::InvalidValue);
        }
        let copy = Self {
            handle: fresh(),
            context: self.context,
            state: Mutex::new(State {
                graph: state.graph.clone(),
                nodes: state.nodes.clone(),
                references: state.references.clone(),
                keep: state.keep.clone(),
            }),
        };
        let handle = copy.handle;
        GRAPHS.insert_as(handle, Arc::new(copy));
        Ok(handle)
    }

    /// Returns true if the capture has ended. A graph cannot be destroyed before that.
    pub(crate) fn is_finished(&self) -> bool {
        lock(&self.state).graph.is_some()
    }
}

/// Enqueues a launch of a graph. The launch waits for earlier work of the stream and for the
/// previous launch of the graph.
pub(crate) fn launch(exec: &Arc<Exec>, stream: &Stream, context: &Context) -> Result<()> {
    if exec.context != context.handle || stream.context != context.handle {
        return Err(Status::InvalidHandle);
    }
    let run = cpu::Command::Graph(exec.graph.clone());
    if let capture::Info::None = capture::info(stream)? {
        capture::submit(stream, cpu::Command::Wait(exec.last.clone()))?;
        capture::submit(stream, run)?;
        capture::submit(stream, cpu::Command::Record(exec.last.clone()))?;
        let keep = Arc::clone(exec);
        let kept = cpu::Command::host(move || {
            let _kept = &keep;
            Ok(())
        });
        capture::submit(stream, kept)?;
    } else if let Some(graph) = capture::submit(stream, run)? {
        let keep: Arc<Exec> = Arc::clone(exec);
        graph.keep(keep);
    }
    Ok(())
}

impl UserObject {
    /// Creates an object. Returns its handle.
    pub(crate) fn create(data: *mut c_void, destroy: Callback, references: u32) -> usize {
        let handle = fresh();
        let object = Self {
            handle,
            references: Mutex::new(references),
            destroy,
            data: data as usize,
        };
        USER_OBJECTS.insert_as(handle, Arc::new(object));
        handle
    }

    /// Adds references.
    pub(crate) fn add(&self, count: u32) {
        *lock(&self.references) += count;
    }

    /// Releases references. When the last reference is released, another thread calls the
    /// destructor.
    pub(crate) fn release(&self, count: u32) -> Result<()> {
        let mut references = lock(&self.references);
        if count == 0 || *references < count {
            return Err(Status::InvalidValue);
        }
        *references -= count;
        if *references == 0 {
            USER_OBJECTS.remove(self.handle);
            destroy_later(self.destroy, self.data);
        }
        Ok(())
    }
}

/// Calls a destructor on a separate thread, as the driver does.
fn destroy_later(destroy: Callback, data: usize) {
    type Job = (Callback, usize);
    static DESTRUCTORS: OnceLock<Option<Mutex<Sender<Job>>>> = OnceLock::new();
    let sender = DESTRUCTORS.get_or_init(|| {
        let (sender, jobs) = channel::<Job>();
        let thread = thread::Builder::new().name("cuda-fake-destructors".to_owned());
        let started = thread.spawn(move || {
            for (destroy, data) in jobs {
                run(destroy, data);
            }
        });
        started.ok().map(|_| Mutex::new(sender))
    });
    let sent = sender
        .as_ref()
        .is_some_and(|sender| lock(sender).send((destroy, data)).is_ok());
    if !sent {
        run(destroy, data);
    }
}

/// Calls a user function.
pub(crate) fn run(function: Callback, data: usize) {
    callback(|| {
        // SAFETY: `cuda.h` requires that the driver may call `function` with `data`.
        unsafe { function(data as *mut c_void) }
    });
}
