//! Signals and counters: updates at a peer, waits, reads and resets.

use fusewire_device::call::Operation;
use fusewire_device::comm::WindowAddr;
use fusewire_device::window::Compare;
use fusewire_kernels::window::{
    NONE, RAISED, WINDOW_SIGNAL, WINDOW_WAIT, WindowSignalParams, WindowWaitParams,
};

use super::Window;
use crate::Result;
use crate::comm::observe::OpInfo;
use crate::comm::submit::{PreparedOp, invalid};
use crate::comm::windows::WindowPart;
use crate::comm::work::Work;

/// Update of a signal's slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalUpdate {
    /// Stores the value.
    Set(u64),
    /// Adds the value, wrapping.
    Add(u64),
}

/// Condition that ends a wait for a signal.
#[derive(Clone, Copy, Debug)]
enum WaitCondition {
    /// One more raise than the waits before.
    Raised,
    /// A value that satisfies the comparison with another one.
    Value(Compare, u64),
}

impl Window {
    /// Raises signal `signal` at `peer`: adds 1, for [`Window::wait_raised`]. `peer` may be this
    /// rank. [`Window::put_signal`] puts and raises in one launch.
    ///
    /// # Errors
    /// The errors of [`Window::put`].
    pub fn raise(&self, peer: u32, signal: u32) -> Result<()> {
        let update = SignalUpdate::Add(1);
        self.comm
            .run(&self.prepare_signal("raise", peer, signal, update)?)
    }

    /// Enqueues [`Window::raise`].
    ///
    /// # Errors
    /// The errors of [`Window::put`].
    pub fn raise_async(&self, peer: u32, signal: u32) -> Result<Work> {
        let update = SignalUpdate::Add(1);
        self.comm
            .submit(&self.prepare_signal("raise", peer, signal, update)?)
    }

    /// Waits until `sender` has raised this rank's signal `signal` once more than this rank has
    /// waited for it before. With `None`, waits until every rank, this one included, has done so.
    /// Each wait uses up one raise. The count includes the launches of graph replays, so the signal
    /// needs no reset and a captured wait needs no value. A sender may raise a signal several times
    /// before the receiver waits.
    ///
    /// [`Window::wait_signal`] compares the value of a signal instead, and uses up nothing. Use
    /// each signal in one of the two ways only, because a [`SignalUpdate::Set`] or an
    /// [`SignalUpdate::Add`] of another value than 1 changes the count.
    ///
    /// Kernels count in the same words, separately for each block
    /// ([`fusewire_device::Window::wait`]): a raise or wait of the host counts as one by block 0.
    /// The waits of a rank for one signal must be ordered, for example by a stream.
    ///
    /// # Errors
    /// The errors of [`Window::put`]; [`Error::Timeout`](crate::Error::Timeout) names the sender.
    pub fn wait_raised(&self, signal: u32, sender: Option<u32>) -> Result<()> {
        let condition = WaitCondition::Raised;
        self.comm
            .run(&self.prepare_wait("wait_raised", signal, sender, condition)?)
    }

    /// Enqueues [`Window::wait_raised`]: later work on the stream waits.
    ///
    /// # Errors
    /// The errors of [`Window::wait_raised`].
    pub fn wait_raised_async(&self, signal: u32, sender: Option<u32>) -> Result<Work> {
        let condition = WaitCondition::Raised;
        self.comm
            .submit(&self.prepare_wait("wait_raised", signal, sender, condition)?)
    }

    /// Updates this rank's slot of signal `signal` at `peer`, for [`Window::wait_signal`].
    ///
    /// # Errors
    /// The errors of [`Window::put`].
    pub fn signal(&self, peer: u32, signal: u32, update: SignalUpdate) -> Result<()> {
        self.comm
            .run(&self.prepare_signal("signal", peer, signal, update)?)
    }

    /// Enqueues [`Window::signal`].
    ///
    /// # Errors
    /// The errors of [`Window::put`].
    pub fn signal_async(&self, peer: u32, signal: u32, update: SignalUpdate) -> Result<Work> {
        self.comm
            .submit(&self.prepare_signal("signal", peer, signal, update)?)
    }

    /// Waits until the value of this rank's signal `signal`, that of `sender` or the sum over all
    /// ranks, satisfies `compare` with `value`. Signals keep their values: let the awaited value
    /// grow, or reset the signal while no rank can update it. A captured wait has the same value in
    /// every replay; [`Window::wait_raised`] counts instead.
    ///
    /// # Errors
    /// The errors of [`Window::put`]; [`Error::Timeout`](crate::Error::Timeout) names the sender.
    pub fn wait_signal(
        &self,
        signal: u32,
        sender: Option<u32>,
        compare: Compare,
        value: u64,
    ) -> Result<()> {
        let condition = WaitCondition::Value(compare, value);
        self.comm
            .run(&self.prepare_wait("wait_signal", signal, sender, condition)?)
    }

    /// Enqueues [`Window::wait_signal`]: later work on the stream waits.
    ///
    /// # Errors
    /// The errors of [`Window::wait_signal`].
    pub fn wait_signal_async(
        &self,
        signal: u32,
        sender: Option<u32>,
        compare: Compare,
        value: u64,
    ) -> Result<Work> {
        let condition = WaitCondition::Value(compare, value);
        self.comm
            .submit(&self.prepare_wait("wait_signal", signal, sender, condition)?)
    }

    /// Returns the current value of this rank's signal `signal`: that of one sender, or the sum
    /// over all ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a signal or rank out of range.
    pub fn read_signal(&self, signal: u32, sender: Option<u32>) -> Result<u64> {
        self.check_signal("read_signal", signal)?;
        if let Some(sender) = sender {
            self.peer("read_signal", sender)?;
        }
        let senders = match sender {
            Some(sender) => sender..sender + 1,
            None => self.comm.ranks(),
        };
        let device = &self.shared.device;
        let mut value = 0u64;
        for sender in senders {
            for block in 0..device.blocks {
                let slot = device.slot_at(signal, sender, block);
                let (memory, at) = self.own_word(slot)?;
                value = value.wrapping_add(memory.load(at));
            }
        }
        Ok(value)
    }

    /// Sets this rank's signal `signal` to 0 for all senders. No sender may be updating it, and
    /// none may update it before it knows that this function has returned.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a signal out of range, or a
    /// window that was freed.
    pub fn reset_signal(&self, signal: u32) -> Result<()> {
        self.check_signal("reset_signal", signal)?;
        let (device, own) = (&self.shared.device, self.comm.rank());
        for sender in 0..self.comm.size() {
            for block in 0..device.blocks {
                for word in [
                    device.slot_at(signal, sender, block),
                    device.taken_at(signal, sender, block),
                ] {
                    let (memory, at) = self.own_word(word)?;
                    memory.store(at, 0)?;
                }
                let sent = device.sent_at(signal, own, block);
                match &self.shared.parts[1][sender as usize] {
                    Some((memory, start)) => memory.store(start + sent, 0)?,
                    None => self.store_by_network(sender, sent),
                }
            }
        }
        Ok(())
    }

    /// Returns the current value of this rank's counter `counter`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a counter out of range.
    pub fn read_counter(&self, counter: u32) -> Result<u64> {
        let (memory, at) = self.counter("read_counter", counter)?;
        Ok(memory.load(at))
    }

    /// Sets this rank's counter `counter` to 0. No kernel of this rank may be counting or waiting
    /// for it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a counter out of range, or a
    /// window that was freed.
    pub fn reset_counter(&self, counter: u32) -> Result<()> {
        let (memory, at) = self.counter("reset_counter", counter)?;
        memory.store(at, 0)
    }

    /// Returns the memory and the offset of a counter.
    fn counter(&self, operation: &'static str, counter: u32) -> Result<WindowPart> {
        self.alive(operation)?;
        let device = &self.shared.device;
        if counter >= device.counters {
            return Err(invalid(
                operation,
                format!("counter {counter} of {}", device.counters),
            ));
        }
        self.own_word(device.counter_at(counter))
    }

    /// Returns the memory and the offset of a word of this rank's signal pad. The word is only
    /// accessed atomically.
    fn own_word(&self, offset: u64) -> Result<WindowPart> {
        let part = self.shared.parts[1][self.comm.rank() as usize].as_ref();
        let (memory, start) = part.ok_or_else(|| {
            invalid(
                "read a signal",
                "the window has no part on this rank".to_owned(),
            )
        })?;
        Ok((memory.clone(), start + offset))
    }

    /// Stores 0 to a word of `rank`'s signal pad, before all later requests to that rank.
    fn store_by_network(&self, rank: u32, offset: u64) {
        if let Some(network) = &self.comm.inner.executor.network {
            network.store(
                rank,
                WindowAddr::new(self.shared.device.signal_pad, offset),
                0,
            );
        }
    }

    fn prepare_signal(
        &self,
        name: &'static str,
        peer: u32,
        signal: u32,
        update: SignalUpdate,
    ) -> Result<PreparedOp<'static>> {
        self.peer(name, peer)?;
        self.check_signal(name, signal)?;
        let call = self.call(Operation::Signal, 0, peer);
        let (value, add) = match update {
            SignalUpdate::Set(value) => (value, 0),
            SignalUpdate::Add(value) => (value, 1),
        };
        let params = WindowSignalParams {
            header: self.comm.header(call, u64::from(signal)),
            signal: u64::from(signal),
            window: self.device_window(),
            value,
            add,
        };
        let op_info = OpInfo {
            call,
            ..OpInfo::default()
        };
        Ok(self.bind(PreparedOp::new(
            &self.comm,
            &WINDOW_SIGNAL,
            params,
            [None; 3],
            false,
            op_info,
        )))
    }

    fn prepare_wait(
        &self,
        name: &'static str,
        signal: u32,
        sender: Option<u32>,
        condition: WaitCondition,
    ) -> Result<PreparedOp<'static>> {
        self.check_signal(name, signal)?;
        if let Some(sender) = sender {
            self.peer(name, sender)?;
        }
        let (compare, value) = match condition {
            WaitCondition::Raised => (RAISED, 0),
            WaitCondition::Value(compare, value) => (compare as u32, value),
        };
        let peer = sender.unwrap_or(self.comm.rank());
        let call = self.call(Operation::WaitSignal, 0, peer);
        let params = WindowWaitParams {
            header: self.comm.header(call, u64::from(signal)),
            signal: u64::from(signal),
            window: self.device_window(),
            sender: sender.map_or(NONE, u64::from),
            value,
            compare,
        };
        let op_info = OpInfo {
            call,
            ..OpInfo::default()
        };
        Ok(self.bind(PreparedOp::new(
            &self.comm,
            &WINDOW_WAIT,
            params,
            [None; 3],
            false,
            op_info,
        )))
    }
}
