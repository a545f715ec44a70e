//! Ctrl-C while a reply is written: it ends the reply, and the program only when there is none.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;

/// The exit code of a program ended by SIGINT, as shells give it.
const INTERRUPTED: i32 = 130;

/// Watches SIGINT for the life of the process.
#[derive(Clone, Debug, Default)]
pub struct Interrupts {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    is_awaited: AtomicBool,
    notify: Notify,
}

/// Says that someone waits, until dropped.
struct Awaited<'a>(&'a Shared);

impl Interrupts {
    /// Starts to watch on a runtime with a worker of its own, so that the signal is seen while the main thread reads a line.
    ///
    /// The handler is in place when this returns: a line editor puts back the one that it found, so one that came later
    /// would be lost with the first line.
    ///
    /// # Errors
    /// The system takes no handler.
    pub fn watch(runtime: &tokio::runtime::Runtime) -> std::io::Result<Self> {
        let interrupts = Self::default();
        let shared = Arc::clone(&interrupts.shared);
        let mut signals = {
            let _context = runtime.enter();
            signal(SignalKind::interrupt())?
        };
        runtime.spawn(async move {
            while signals.recv().await.is_some() {
                if !shared.interrupt() {
                    std::process::exit(INTERRUPTED);
                }
            }
        });
        Ok(interrupts)
    }

    /// Resolves at the next SIGINT, which then does not end the program.
    pub async fn next(&self) {
        let _awaited = Awaited::new(&self.shared);
        self.shared.notify.notified().await;
    }
}

impl Shared {
    /// Wakes whoever waits; false when nobody does.
    fn interrupt(&self) -> bool {
        let is_awaited = self.is_awaited.load(Ordering::Acquire);
        if is_awaited {
            self.notify.notify_waiters();
        }
        is_awaited
    }
}

impl<'a> Awaited<'a> {
    fn new(shared: &'a Shared) -> Self {
        shared.is_awaited.store(true, Ordering::Release);
        Self(shared)
    }
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        self.0.is_awaited.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_interrupt_wakes_the_waiter_and_nobody_later() {
        let interrupts = Interrupts::default();
        assert!(!interrupts.shared.interrupt());
        let waiting = interrupts.next();
        tokio::pin!(waiting);
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        assert!(interrupts.shared.interrupt());
        waiting.await;
        assert!(!interrupts.shared.interrupt());
        // The one that came before is not kept for the next reply.
        let later = interrupts.next();
        tokio::pin!(later);
        assert!(futures::poll!(later.as_mut()).is_pending());
    }
}
