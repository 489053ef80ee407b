//! One client of the server, without I/O: bytes in, bytes out, and the state that clients share.

use core::mem;
use std::collections::{HashMap, VecDeque};

use super::secret::{self, Role, StoreSecret};
use super::table::Table;
use super::wire::{self, Dialect, Request, RequestError, Writer};

/// Bytes of unread answers at which no further request of a client is handled.
pub(super) const MAX_PENDING_ANSWER: usize = 1 << 20;

/// Number of a client in a server.
pub(super) type Token = u64;

/// What all clients of a server share.
#[derive(Debug, Default)]
pub(super) struct ServerState {
    pub(super) table: Table,
    queues: HashMap<Vec<u8>, VecDeque<Vec<u8>>>,
    /// Clients that wait, each under the first of its keys that is missing.
    waiting: HashMap<Vec<u8>, Vec<Token>>,
    /// Clients whose wait may be over; see [`Session::recheck`].
    pub(super) woken: Vec<Token>,
    /// Requests that were handled.
    pub(super) requests: u64,
}

impl ServerState {
    /// Whether no client is in a list of those who wait.
    #[cfg(test)]
    pub(super) fn nobody_waits(&self) -> bool {
        self.waiting.is_empty()
    }

    fn contains(&self, key: &[u8]) -> bool {
        self.table.contains(key) || self.queues.contains_key(key)
    }

    fn all(&self, keys: &[&[u8]]) -> bool {
        keys.iter().all(|key| self.contains(key))
    }

    /// `key` has come: wakes who waits for it.
    fn arrived(&mut self, key: &[u8]) {
        if let Some(tokens) = self.waiting.remove(key) {
            self.woken.extend(tokens);
        }
    }

    fn set(&mut self, key: &[u8], value: &[u8]) {
        self.table.set(key, value);
        self.arrived(key);
    }

    fn push(&mut self, key: &[u8], value: &[u8]) {
        self.queues
            .entry(key.to_vec())
            .or_default()
            .push_back(value.to_vec());
        // One value, one client: the others would find the queue empty.
        if let Some(tokens) = self.waiting.get_mut(key) {
            if !tokens.is_empty() {
                self.woken.push(tokens.remove(0));
            }
            if tokens.is_empty() {
                self.waiting.remove(key);
            }
        }
    }

    fn pop(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let queue = self.queues.get_mut(key)?;
        let value = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(key);
        }
        value
    }

    /// The value of a key that a client has waited for. As in PyTorch 1.x there is no answer for an
    /// absent key (another rank has deleted it in between): the connection is closed.
    fn present(&self, key: &[u8]) -> Result<&[u8], String> {
        self.table.get(key).ok_or_else(|| {
            format!(
                "key \"{}\" was asked for and does not exist",
                String::from_utf8_lossy(key)
            )
        })
    }
}

/// How far a client has come.
#[derive(Debug)]
enum Stage {
    /// Nothing has arrived yet.
    New(Option<StoreSecret>),
    /// A challenge was sent: the secret, and both nonces.
    Challenged(StoreSecret, secret::Token, secret::Token),
    /// Its requests are handled.
    Trusted,
}

/// One client.
#[derive(Debug)]
pub(super) struct Session {
    token: Token,
    stage: Stage,
    dialect: Option<Dialect>,
    /// Bytes that have arrived and are not a whole request yet.
    incoming: Vec<u8>,
    /// Answers that the peer has not taken yet.
    pub(super) outgoing: Vec<u8>,
    /// Keys of a wait that is not over, and the one of them whose list the client is in.
    awaited: Option<(Vec<Vec<u8>>, usize)>,
}

impl Session {
    /// A client that must show that it has `secret`, if there is one.
    pub(super) fn new(token: Token, secret: Option<StoreSecret>) -> Self {
        Self {
            token,
            stage: Stage::New(secret),
            dialect: None,
            incoming: Vec::new(),
            outgoing: Vec::new(),
            awaited: None,
        }
    }

    /// Whether enough answers are pending that nothing more should be read.
    pub(super) fn is_full(&self) -> bool {
        self.outgoing.len() >= MAX_PENDING_ANSWER
    }

    /// Takes bytes of the peer; [`Session::handle_all`] handles them.
    ///
    /// The error is why the connection has to be closed.
    pub(super) fn receive(&mut self, bytes: &[u8]) -> Result<(), String> {
        if self.incoming.len() + bytes.len() > wire::MAX_REQUEST_BYTES {
            return Err("a request is too long".to_owned());
        }
        self.incoming.extend_from_slice(bytes);
        Ok(())
    }

    /// Handles every whole request, as long as the answers are not too many.
    ///
    /// The error is why the connection has to be closed.
    pub(super) fn handle_all(&mut self, hub: &mut ServerState) -> Result<(), String> {
        let incoming = mem::take(&mut self.incoming);
        let mut at = 0;
        while at < incoming.len() && !self.is_full() {
            match self.handle_first(&incoming[at..], hub) {
                Ok(length) => at += length,
                Err(RequestError::Incomplete) => break,
                Err(RequestError::Invalid(detail)) => return Err(detail),
            }
        }
        self.incoming = incoming;
        self.incoming.drain(..at);
        if self.incoming.is_empty() {
            // One large value must not hold its memory for the life of the connection.
            self.incoming.shrink_to(4 << 10);
        }
        Ok(())
    }

    fn handle_first(&mut self, bytes: &[u8], hub: &mut ServerState) -> Result<usize, RequestError> {
        if !matches!(self.stage, Stage::Trusted) {
            return self.authenticate(bytes);
        }
        let dialect = match self.dialect {
            Some(dialect) => dialect,
            None => *self.dialect.insert(wire::dialect(bytes)?),
        };
        let (request, length) = wire::parse(bytes, dialect)?;
        hub.requests += 1;
        self.handle(hub, request, dialect)
            .map_err(RequestError::Invalid)?;
        Ok(length)
    }

    /// The bytes before the first request; see [`secret`].
    fn authenticate(&mut self, bytes: &[u8]) -> Result<usize, RequestError> {
        let refuse = |detail: &str| Err(RequestError::Invalid(detail.to_owned()));
        match &self.stage {
            Stage::Trusted => Ok(0),
            Stage::New(secret) => {
                let greets = bytes.first() == Some(&secret::HELLO);
                match (secret, greets) {
                    (None, false) => {
                        self.stage = Stage::Trusted;
                        Ok(0)
                    }
                    (None, true) => {
                        self.outgoing.push(secret::REFUSED);
                        refuse("a client has a secret, and this server has none")
                    }
                    (Some(_), false) => {
                        self.outgoing.extend(secret::SECRET_WANTED);
                        refuse("a client did not show that it has the secret")
                    }
                    (Some(secret), true) => {
                        let theirs = *bytes[1..].first_chunk().ok_or(RequestError::Incomplete)?;
                        let own =
                            secret::nonce().map_err(|error| RequestError::Invalid(error.to_string()))?;
                        self.outgoing.push(secret::ACCEPTED);
                        self.outgoing.extend(own);
                        self.outgoing
                            .extend(secret.prove(Role::Server, &theirs, &own));
                        self.stage = Stage::Challenged(secret.clone(), theirs, own);
                        Ok(1 + secret::BYTES)
                    }
                }
            }
            Stage::Challenged(secret, theirs, own) => {
                let proof = bytes.first_chunk().ok_or(RequestError::Incomplete)?;
                if !secret.verify(Role::Client, theirs, own, proof) {
                    self.outgoing.push(secret::REFUSED);
                    return refuse("a client has another secret");
                }
                self.outgoing.push(secret::ACCEPTED);
                self.stage = Stage::Trusted;
                Ok(secret::BYTES)
            }
        }
    }

    fn handle(
        &mut self,
        hub: &mut ServerState,
        request: Request<'_>,
        dialect: Dialect,
    ) -> Result<(), String> {
        if dialect == Dialect::Legacy {
            // An old client cannot call a wait off; it gives up, and asks for something else.
            self.forget_wait(hub);
        }
        let answer = Writer::default();
        let answer = match request {
            Request::Validate(magic) => {
                if magic != wire::VALIDATION_MAGIC {
                    return Err("the validation number is wrong; this is no store client".into());
                }
                answer
            }
            Request::Set(key, value) => {
                hub.set(key, value);
                answer
            }
            Request::CompareSet(key, expected, desired) => {
                let (present, stored) = hub.table.compare_set(key, expected, desired);
                if stored {
                    hub.arrived(key);
                }
                answer.vector(&present)
            }
            Request::Get(key) => answer.vector(hub.present(key)?),
            Request::Add(key, amount) => {
                let sum = hub.table.add(key, amount)?;
                hub.arrived(key);
                answer.i64(sum)
            }
            Request::Check(keys) => answer.u8(if hub.all(&keys) {
                wire::CHECK_READY
            } else {
                wire::CHECK_NOT_READY
            }),
            Request::Wait(keys) => {
                self.forget_wait(hub);
                self.awaited = Some((keys.into_iter().map(<[u8]>::to_vec).collect(), 0));
                self.recheck(hub);
                answer
            }
            Request::KeyCount => answer.i64(hub.table.len() as i64),
            Request::DeleteKey(key) => answer.i64(i64::from(hub.table.delete(key))),
            Request::Append(key, value) => {
                let len = hub.table.get(key).map_or(0, <[u8]>::len) + value.len();
                if len as u64 > wire::MAX_VALUE_BYTES {
                    return Err(format!("append makes a value of {len} bytes"));
                }
                hub.table.append(key, value);
                hub.arrived(key);
                answer
            }
            Request::MultiGet(keys) => {
                let mut answer = answer;
                let mut total = 0;
                for key in keys {
                    let value = hub.present(key)?;
                    total += value.len();
                    if total > wire::MAX_REQUEST_BYTES {
                        return Err("the answer is too long".into());
                    }
                    answer = answer.vector(value);
                }
                answer
            }
            Request::MultiSet(pairs) => {
                for (key, value) in pairs {
                    hub.set(key, value);
                }
                answer
            }
            Request::CancelWait => {
                self.forget_wait(hub);
                answer.u8(wire::WAIT_CANCELED)
            }
            Request::Ping(nonce) => answer.u32(nonce),
            Request::QueuePush(key, value) => {
                hub.push(key, value);
                answer
            }
            Request::QueuePop(key) => match hub.pop(key) {
                Some(value) => answer.i64(1).vector(&value),
                None => answer.i64(0),
            },
            Request::QueueLen(key) => {
                answer.i64(hub.queues.get(key).map_or(0, VecDeque::len) as i64)
            }
        };
        self.outgoing.extend_from_slice(&answer.finish());
        Ok(())
    }

    /// Answers the wait if all its keys are there now; else waits for the first that is missing.
    pub(super) fn recheck(&mut self, hub: &mut ServerState) {
        let Some((keys, listed)) = self.awaited.take() else {
            return;
        };
        // Keys come and go between a wake and this: the client may still be in another list.
        self.unlist(hub, keys.get(listed));
        match keys.iter().position(|key| !hub.contains(key)) {
            None => self.outgoing.push(wire::STOP_WAITING),
            Some(missing) => {
                hub.waiting
                    .entry(keys[missing].clone())
                    .or_default()
                    .push(self.token);
                self.awaited = Some((keys, missing));
            }
        }
    }

    /// Bytes that the buffers of this client hold.
    #[cfg(test)]
    pub(super) fn memory(&self) -> usize {
        self.incoming.capacity() + self.outgoing.capacity()
    }

    /// Ends the wait without an answer.
    pub(super) fn forget_wait(&mut self, hub: &mut ServerState) {
        if let Some((keys, listed)) = self.awaited.take() {
            self.unlist(hub, keys.get(listed));
        }
    }

    /// Takes the client out of the list of those who wait for `key`.
    fn unlist(&self, hub: &mut ServerState, key: Option<&Vec<u8>>) {
        if let Some(key) = key
            && let Some(tokens) = hub.waiting.get_mut(key)
        {
            tokens.retain(|token| *token != self.token);
            if tokens.is_empty() {
                hub.waiting.remove(key);
            }
        }
    }
}
