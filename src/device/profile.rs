//! Times of launches: while it is on, an event is recorded before and after each launch.
#![allow(unsafe_code)] // src/device is the home of unsafe: here it is events given back.

use super::driver::{Driver, Fault, RawEvent};
use super::{Device, DeviceError, Recordable};

/// One launch and its time on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LaunchTime {
    /// The kernel's entry point.
    pub kernel: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Milliseconds, what the event costs included.
    pub ms: f32,
}

/// The launches so far; events are kept for the next time.
#[derive(Default)]
pub(super) struct Profile {
    pub is_on: bool,
    launches: Vec<(&'static str, [u32; 3])>,
    /// Those before and after each launch, and more from longer lists before.
    events: Vec<[RawEvent; 2]>,
}

impl Profile {
    /// The event to record before the next launch.
    pub fn before(&mut self, driver: &dyn Driver) -> Result<RawEvent, Fault> {
        let idx = self.launches.len();
        if idx == self.events.len() {
            self.events.push([driver.event()?, driver.event()?]);
        }
        Ok(self.events[idx][0])
    }

    /// Notes the launch that was made; the event to record after it.
    pub fn after(&mut self, kernel: &'static str, grid: [u32; 3]) -> RawEvent {
        self.launches.push((kernel, grid));
        self.events[self.launches.len() - 1][1]
    }

    /// Gives the events back.
    pub fn release(&mut self, driver: &dyn Driver) {
        for event in self.events.drain(..).flatten() {
            // SAFETY: the event was made by `before`, is given back once, and the device is idle or lost.
            unsafe { driver.destroy_event(event) };
        }
    }
}

impl Device {
    /// From now on every launch that is not recorded into a graph is timed, until [`Device::end_profile`].
    ///
    /// # Errors
    /// [`DeviceError::Lost`]; [`DeviceError::BadArgument`] while a graph is recorded.
    pub fn start_profile(&self) -> Result<(), DeviceError> {
        let mut state = self.enter("start_profile", Recordable::No("a recording never runs"))?;
        state.profile.launches.clear();
        state.profile.is_on = true;
        Ok(())
    }

    /// Waits for the launches since [`Device::start_profile`] and tells how long each took.
    ///
    /// # Errors
    /// As [`Device::start_profile`].
    pub fn end_profile(&self) -> Result<Vec<LaunchTime>, DeviceError> {
        let mut state = self.enter("end_profile", Recordable::No("it waits"))?;
        let profile = &mut state.profile;
        profile.is_on = false;
        let driver = self.0.driver.as_ref();
        self.check(driver.synchronize())?;
        let times = profile.launches.iter().zip(&profile.events).map(|(&(kernel, grid), &[before, after])| {
            let ms = self.check(driver.elapsed_ms(before, after))?;
            Ok(LaunchTime { kernel, grid, ms })
        });
        times.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::for_each_device;
    use crate::ops::read::{self, ReadArgs};

    #[test]
    fn launches_are_timed_in_order_and_only_while_it_is_on() {
        for_each_device(|device| {
            let (from, out) = (device.alloc(1 << 16).unwrap(), device.alloc(1 << 16).unwrap());
            device.fill(&from, 0, 1 << 16, 3).unwrap();
            let args = |n_bytes| ReadArgs { from: from.address(), out: out.address(), n_bytes };
            for n in [3, 1, 5] {
                read::launch(device, &args(16)).unwrap();
                device.start_profile().unwrap();
                for _ in 0..n {
                    read::launch(device, &args(1 << 16)).unwrap();
                }
                let times = device.end_profile().unwrap();
                assert_eq!(times.len(), n);
                let is_read = |time: &super::LaunchTime| {
                    time.kernel == "read" && time.grid == [read::n_blocks(device), 1, 1] && time.ms >= 0.0
                };
                assert!(times.iter().all(is_read), "{times:?}");
            }
            device.start_profile().unwrap();
            assert_eq!(device.end_profile().unwrap(), []);
        });
    }
}
