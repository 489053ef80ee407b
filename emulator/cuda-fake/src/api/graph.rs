//! Graphs and user objects.

use core::ffi::{c_uint, c_ulonglong, c_void};

use super::{export, get, put, with};
use crate::core::context::{current, ready};
use crate::core::graph::{self, Callback, UserObject};
use crate::core::handles::{EXECS, GRAPHS, USER_OBJECTS};
use crate::core::stream::find;
use crate::status::{Result, Status};

/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, a mandatory flag.
const NO_DESTRUCTOR_SYNC: c_uint = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`.
const MOVE: c_uint = 1;

fn instantiate(out: *mut usize, graph: usize) -> Result<()> {
    let (_, graph) = with(&GRAPHS, graph)?;
    if out.is_null() {
        return Err(Status::InvalidValue);
    }
    put(out, graph.instantiate()?)
}

export! {
    fn cuGraphGetNodes(graph: usize, outs: *mut usize, count: *mut usize) {
        ready()?;
        let graph = GRAPHS.get(graph).ok_or(Status::InvalidValue)?;
        let nodes = graph.nodes();
        if outs.is_null() {
            return put(count, nodes.len());
        }
        let capacity = get(count)?;
        for at in 0..capacity {
            let node = nodes.get(at).copied().unwrap_or(0);
            // SAFETY: `at` is below `*count`, and `cuda.h` requires an array of `*count` elements.
            put(unsafe { outs.add(at) }, node)?;
        }
        put(count, nodes.len().min(capacity))
    }

    fn cuGraphClone(out: *mut usize, graph: usize) {
        ready()?;
        let graph = GRAPHS.get(graph).ok_or(Status::InvalidValue)?;
        put(out, graph.duplicate()?)
    }

    fn cuGraphDestroy(graph: usize) {
        ready()?;
        let found = GRAPHS.get(graph).ok_or(Status::InvalidValue)?;
        if !found.is_finished() {
            return Err(Status::InvalidValue);
        }
        GRAPHS.remove(graph);
        Ok(())
    }

    fn cuGraphInstantiateWithFlags(out: *mut usize, graph: usize, flags: c_ulonglong) {
        // Flags: auto free (1), upload (2, not supported), device launch (4, not supported), node
        // priority (8).
        if flags & !9 != 0 {
            return Err(Status::NotSupported);
        }
        instantiate(out, graph)
    }

    fn cuGraphUpload(exec: usize, stream: usize) {
        let (context, _) = with(&EXECS, exec)?;
        find(&context, stream).map(drop)
    }

    fn cuGraphLaunch(exec: usize, stream: usize) {
        let (context, exec) = with(&EXECS, exec)?;
        let stream = find(&context, stream)?;
        graph::launch(&exec, &stream, &context)
    }

    fn cuGraphExecDestroy(exec: usize) {
        ready()?;
        EXECS.remove(exec).map(drop).ok_or(Status::InvalidValue)
    }

    fn cuUserObjectCreate(
        out: *mut usize,
        data: *mut c_void,
        destroy: Option<Callback>,
        references: c_uint,
        flags: c_uint,
    ) {
        ready()?;
        let destroy = destroy.ok_or(Status::InvalidValue)?;
        if out.is_null() || references == 0 || flags != NO_DESTRUCTOR_SYNC {
            return Err(Status::InvalidValue);
        }
        put(out, UserObject::create(data, destroy, references))
    }

    fn cuUserObjectRetain(object: usize, count: c_uint) {
        ready()?;
        let object = USER_OBJECTS.get(object).ok_or(Status::InvalidValue)?;
        if count == 0 {
            return Err(Status::InvalidValue);
        }
        object.add(count);
        Ok(())
    }

    fn cuUserObjectRelease(object: usize, count: c_uint) {
        ready()?;
        let object = USER_OBJECTS.get(object).ok_or(Status::InvalidValue)?;
        object.release(count)
    }

    fn cuGraphRetainUserObject(graph: usize, object: usize, count: c_uint, flags: c_uint) {
        current()?;
        let graph = GRAPHS.get(graph).ok_or(Status::InvalidValue)?;
        let object = USER_OBJECTS.get(object).ok_or(Status::InvalidValue)?;
        if flags > MOVE {
            return Err(Status::InvalidValue);
        }
        graph.retain(object, count, flags != MOVE)
    }

    fn cuGraphReleaseUserObject(graph: usize, object: usize, count: c_uint) {
        current()?;
        let graph = GRAPHS.get(graph).ok_or(Status::InvalidValue)?;
        let object = USER_OBJECTS.get(object).ok_or(Status::InvalidValue)?;
        graph.release(&object, count)
    }
}
