//! Graphs, instantiated graphs, and what they keep alive.

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

/// A function that gets its data.
pub(crate) type Callback = unsafe extern "C" fn(*mut c_void);

/// A captured graph, or one that still grows.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) handle: usize,
    pub(crate) context: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// `None` while it is captured.
    graph: Option<cpu::Graph>,
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

/// References to user objects; given back when dropped.
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
            // The references were counted when they were taken.
            let _ = object.release(*count);
        }
    }
}

/// An object of the user's whose destructor runs when nobody refers to it.
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
    graph: cpu::GraphExec,
    /// Its latest launch: launches of one graph run one after another.
    last: cpu::Event,
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
    /// A graph that a capture fills.
    pub(crate) fn growing(context: usize) -> Arc<Self> {
        Arc::new(Self {
            handle: fresh(),
            context,
            state: Mutex::default(),
        })
    }

    /// The capture has ended.
    pub(crate) fn finish(&self, graph: cpu::Graph, nodes: Vec<usize>) {
        let mut state = lock(&self.state);
        state.graph = Some(graph);
        state.nodes = nodes;
    }

    pub(crate) fn nodes(&self) -> Vec<usize> {
        lock(&self.state).nodes.clone()
    }

    /// Keeps an object until the graph, and all that was instantiated from it, is gone.
    fn keep(&self, object: Arc<dyn Any + Send + Sync>) {
        lock(&self.state).keep.push(object);
    }

    /// Takes references to a user object, or those of the caller.
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

    /// Gives references back.
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

    /// A runnable graph.
    pub(crate) fn instantiate(&self) -> Result<usize> {
        let state = lock(&self.state);
        let graph = state.graph.as_ref().ok_or(Status::InvalidValue)?;
        let exec = Exec {
            context: self.context,
            graph: graph.instantiate().or(Err(Status::Unknown))?,
            last: cpu::Event::new(),
            _references: state.references.clone(),
            _keep: state.keep.clone(),
        };
        Ok(EXECS.insert(Arc::new(exec)))
    }

    /// A copy.
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

    /// Whether it can be destroyed: a graph that is captured cannot.
    pub(crate) fn is_finished(&self) -> bool {
        lock(&self.state).graph.is_some()
    }
}

/// Launches a graph: behind the stream's work, and behind the launch of it before.
pub(crate) fn launch(exec: &Arc<Exec>, stream: &Stream, context: &Context) -> Result<()> {
    if exec.context != context.handle || stream.context != context.handle {
        return Err(Status::InvalidHandle);
    }
    let run = cpu::Item::Graph(exec.graph.clone());
    if let capture::Info::None = capture::info(stream)? {
        capture::submit(stream, cpu::Item::Wait(exec.last.clone()))?;
        capture::submit(stream, run)?;
        capture::submit(stream, cpu::Item::Record(exec.last.clone()))?;
        let keep = Arc::clone(exec);
        let drop_it = cpu::Item::Host(Box::new(move || {
            drop(keep);
            Ok(())
        }));
        capture::submit(stream, drop_it)?;
    } else if let Some(graph) = capture::submit(stream, run)? {
        let keep: Arc<Exec> = Arc::clone(exec);
        graph.keep(keep);
    }
    Ok(())
}

impl UserObject {
    /// A new object; gives its handle.
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

    /// Takes references.
    pub(crate) fn add(&self, count: u32) {
        *lock(&self.references) += count;
    }

    /// Gives references back; with the last one the destructor is called, on another thread.
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

/// Has the driver's own thread call a destructor.
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

/// Calls a function of the user's.
pub(crate) fn run(function: Callback, data: usize) {
    callback(|| {
        // SAFETY: whoever gave function and data promised that this may be called with it.
        unsafe { function(data as *mut c_void) }
    });
}
