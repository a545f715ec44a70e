//! Times of launches: while it is on, an event is recorded before each launch, and one at the end.
#![allow(unsafe_code)] // src/device is the home of unsafe: here it is events given back.

use super::driver::{Driver, RawEvent};
use super::{Device, DeviceError, Recordable};

/// One launch and the device time until the next one began (or until the end).
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
    /// At least one more than launches once they are timed.
    events: Vec<RawEvent>,
}

impl Profile {
    /// Notes a launch that is about to be made.
    pub fn mark(&mut self, device: &Device, kernel: &'static str, grid: [u32; 3]) -> Result<(), DeviceError> {
        self.record(device)?;
        self.launches.push((kernel, grid));
        Ok(())
    }

    /// Records the event that follows those of the launches so far.
    fn record(&mut self, device: &Device) -> Result<RawEvent, DeviceError> {
        let driver = device.0.driver.as_ref();
        let idx = self.launches.len();
        if idx == self.events.len() {
            self.events.push(device.check(driver.event())?);
        }
        device.check(driver.record(self.events[idx]))?;
        Ok(self.events[idx])
    }

    /// Gives the events back.
    pub fn release(&mut self, driver: &dyn Driver) {
        for event in self.events.drain(..) {
            // SAFETY: the event was made by `record`, is given back once, and the device is idle or lost.
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
        let last = profile.record(self)?;
        let driver = self.0.driver.as_ref();
        self.check(driver.wait(last))?;
        let times = profile.launches.iter().zip(profile.events.windows(2)).map(|(&(kernel, grid), pair)| {
            let ms = self.check(driver.elapsed_ms(pair[0], pair[1]))?;
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
