//! The front end's side of the engine: a bounded door in, an event stream out.
//!
//! Cancelling needs no message that could be lost: the engine looks at every step whether a request's event channel is
//! still open, and which of its choices the front end has ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};

use super::event::Event;
use super::request::{EngineLimits, RejectReason, ValidRequest};
use crate::ids::RequestId;

/// What reaches the engine thread.
#[derive(Debug)]
pub enum Command {
    /// Run a request.
    Submit(Box<Submitted>),
    /// Finish what runs, refuse what comes, fail what is left after the deadline.
    Drain {
        /// When to give up.
        deadline: std::time::Instant,
    },
}

/// A request at the engine's side of the door.
#[derive(Debug)]
pub struct Submitted {
    /// Its number.
    pub id: RequestId,
    /// The request.
    pub request: ValidRequest,
    /// When it came in.
    pub arrival: std::time::Instant,
    /// Where its events go. The capacity holds every event the request can cause, so sending never blocks; closed when the
    /// client has gone.
    pub events: mpsc::Sender<Event>,
    /// What the front end wants to stop.
    pub control: Arc<RequestControl>,
    /// The request's place in the queue; held until the request is over.
    pub permit: OwnedSemaphorePermit,
}

/// Shared between a request's two sides.
#[derive(Debug, Default)]
pub struct RequestControl {
    finished_choices: AtomicU64,
}

impl RequestControl {
    /// Whether the front end has ended this choice.
    #[must_use]
    pub fn is_finished(&self, choice: u32) -> bool {
        self.finished_mask() >> choice & 1 == 1
    }

    /// The choices that the front end has ended, one bit each.
    #[must_use]
    pub fn finished_mask(&self) -> u64 {
        self.finished_choices.load(Ordering::Acquire)
    }
}

/// Whether the engine can serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineHealth {
    /// Weights are loading or the warm-up runs.
    Starting,
    /// Serving.
    Ready,
    /// Finishing what runs; nothing new is taken.
    Draining,
    /// A step overran its deadline.
    Stalled,
    /// The engine thread ended or the device is lost.
    Dead(String),
}

/// Clonable door to the engine.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    commands: mpsc::Sender<Command>,
    limits: EngineLimits,
    queue: Arc<Semaphore>,
    health: watch::Receiver<EngineHealth>,
    next_id: AtomicU64,
}

/// The engine's side of a new door.
#[derive(Debug)]
pub struct EngineSide {
    /// Commands, in order of arrival.
    pub commands: mpsc::Receiver<Command>,
    /// Set by the engine (and its watchdog), seen by /health.
    pub health: watch::Sender<EngineHealth>,
}

impl EngineHandle {
    /// A door and its other side.
    #[must_use]
    pub fn new(limits: EngineLimits) -> (Self, EngineSide) {
        let (commands_tx, commands) = mpsc::channel(limits.max_queued + 8);
        let (health, health_rx) = watch::channel(EngineHealth::Starting);
        let queue = Arc::new(Semaphore::new(limits.max_queued));
        let shared = Shared { commands: commands_tx, limits, queue, health: health_rx, next_id: AtomicU64::new(1) };
        (Self { shared: Arc::new(shared) }, EngineSide { commands, health })
    }

    /// The engine's limits.
    #[must_use]
    pub fn limits(&self) -> &EngineLimits {
        &self.shared.limits
    }

    /// The engine's state now.
    #[must_use]
    pub fn health(&self) -> EngineHealth {
        self.shared.health.borrow().clone()
    }

    /// Hands a request over; never waits.
    ///
    /// # Errors
    /// `QueueFull` when too many requests are unfinished, `NotServing` when the engine is not ready.
    pub fn submit(&self, request: ValidRequest) -> Result<Submission, RejectReason> {
        match self.health() {
            EngineHealth::Ready | EngineHealth::Stalled => {}
            state => return Err(RejectReason::NotServing(state)),
        }
        let permit = Arc::clone(&self.shared.queue)
            .try_acquire_owned()
            .map_err(|_| RejectReason::QueueFull { max_queued: self.shared.limits.max_queued })?;
        let (events_tx, events) = mpsc::channel(request.max_events());
        let control = Arc::new(RequestControl::default());
        let id = RequestId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        let submitted = Submitted {
            id,
            request,
            arrival: std::time::Instant::now(),
            events: events_tx,
            control: Arc::clone(&control),
            permit,
        };
        // The channel is larger than the number of permits, so this fails only when the engine is gone.
        self.shared
            .commands
            .try_send(Command::Submit(Box::new(submitted)))
            .map_err(|_| RejectReason::NotServing(EngineHealth::Dead("the engine has ended".to_owned())))?;
        Ok(Submission { id, events, control })
    }

    /// Starts the drain: see [`Command::Drain`].
    pub fn drain(&self, deadline: std::time::Instant) {
        // A full or closed channel means that the engine is ending already.
        let _ = self.shared.commands.try_send(Command::Drain { deadline });
    }
}

/// An accepted request at the front end's side. Dropping it cancels the request.
#[derive(Debug)]
pub struct Submission {
    id: RequestId,
    events: mpsc::Receiver<Event>,
    control: Arc<RequestControl>,
}

impl Submission {
    /// The request's number.
    #[must_use]
    pub const fn id(&self) -> RequestId {
        self.id
    }

    /// The next event; `None` after the terminal one.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// Ends one choice (a stop string was seen). Its `ChoiceFinished` says `Requested` unless it has ended already.
    pub fn finish_choice(&self, choice: u32) {
        self.control.finished_choices.fetch_or(1 << choice, Ordering::AcqRel);
    }
}
