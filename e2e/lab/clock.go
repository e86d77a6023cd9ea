package lab

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Processes of one kernel share its wall clock, and a time namespace shifts the other clocks alone. What is a process's
// own is the code that reads the clocks: the vDSO, which the kernel maps into each process, and of which a debugger may
// write a private copy. Go's runtime calls __vdso_clock_gettime there, whether or not a program is linked statically.

const clockFunction = "__vdso_clock_gettime"

// shiftedClock is x86-64 code in place of clockFunction: it makes the system call, and adds the seconds that follow, as
// four bytes, to what the kernel says of CLOCK_REALTIME, which is clock 0. The monotonic clocks stay as they are, as
// when somebody sets the time. The instruction ret comes last.
var shiftedClock = []byte{
	0xb8, 0xe4, 0, 0, 0, // mov eax, 228 (clock_gettime)
	0x0f, 0x05, // syscall
	0x85, 0xff, // test edi, edi: which clock
	0x75, 0x0b, // jnz to ret
	0x85, 0xc0, // test eax, eax: no error
	0x75, 0x07, // jnz to ret
	0x48, 0x81, 0x06, // add qword [rsi],
}

const ret = 0xc3

// ShiftClock sets the wall clock of the running process ahead, or back, of the machine's. 0 sets it right. The next
// start has the right time again.
func (a *Agent) ShiftClock(by time.Duration) error {
	if runtime.GOARCH != "amd64" {
		return errors.New("shift a clock: the lab knows how on amd64 alone")
	}
	seconds := int64(by / time.Second)
	if seconds < math.MinInt32 || seconds > math.MaxInt32 {
		return fmt.Errorf("shift a clock by %v: more than 68 years", by)
	}
	p := a.current()
	if p == nil || !p.running() {
		return fmt.Errorf("%s does not run", a.Name())
	}
	if err := p.replaceClock(int32(seconds)); err != nil {
		return fmt.Errorf("shift the clock of %s: %w", a.Name(), err)
	}
	return nil
}

// replaceClock writes [shiftedClock] in place of the function that reads clocks, while no thread is in that part of it.
// Where it is there already, only the seconds change, wherever the threads are.
func (p *process) replaceClock(seconds int32) error {
	pid := p.cmd.Process.Pid
	at, size, err := clockOf(pid)
	if err != nil {
		return err
	}
	memory, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer memory.Close()
	now := make([]byte, len(shiftedClock))
	if _, err := memory.ReadAt(now, int64(at)); err != nil {
		return err
	}
	code := binary.LittleEndian.AppendUint32(nil, uint32(seconds))
	from, last := at+uint64(len(shiftedClock)), at
	if !bytes.Equal(now, shiftedClock) {
		code = append(append(slices.Clone(shiftedClock), code...), ret)
		from, last = at, at+uint64(len(code))
	}
	if size < uint64(len(shiftedClock)+5) {
		return fmt.Errorf("%s has %d bytes, which is too few", clockFunction, size)
	}
	for range 100 {
		done, err := p.whileStopped(at, last, func() error {
			_, err := memory.WriteAt(code, int64(from))
			return err
		})
		if done || err != nil {
			return err
		}
	}
	return errors.New("some thread always reads the clock")
}

// whileStopped stops all threads, calls f if none is at an address from first up to last, and lets them go on.
func (p *process) whileStopped(first, last uint64, f func() error) (done bool, err error) {
	if err := p.signal(syscall.SIGSTOP); err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, p.signal(syscall.SIGCONT)) }()
	pid := p.cmd.Process.Pid
	for stopped := false; !stopped; time.Sleep(time.Millisecond) {
		if !p.running() {
			return false, os.ErrProcessDone
		}
		if stopped, err = allStopped(pid); err != nil {
			return false, err
		}
	}
	places, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", pid))
	if err != nil {
		return false, err
	}
	for _, file := range places {
		text, err := os.ReadFile(file)
		if err != nil {
			return false, err
		}
		fields := strings.Fields(string(text))
		pc, err := strconv.ParseUint(strings.TrimPrefix(fields[len(fields)-1], "0x"), 16, 64)
		if err != nil {
			return false, fmt.Errorf("%s: %q: %w", file, text, err)
		}
		if pc >= first && pc < last {
			return false, nil
		}
	}
	return true, f()
}

// allStopped reports whether each thread of a process is stopped.
func allStopped(pid int) (bool, error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		return false, err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			return false, nil // the thread has just ended
		}
		if err != nil {
			return false, err
		}
		// The state follows the name, which is in parentheses.
		if _, state, _ := strings.Cut(string(text), ") "); !strings.HasPrefix(state, "T") {
			return false, nil
		}
	}
	return len(files) > 0, nil
}

// clockOf returns where the vDSO's clock function of a process is, and its size in bytes.
func clockOf(pid int) (at, size uint64, err error) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(maps)) {
		var first, last uint64
		if !strings.HasSuffix(strings.TrimSpace(line), "[vdso]") {
			continue
		}
		if _, err := fmt.Sscanf(line, "%x-%x", &first, &last); err != nil {
			return 0, 0, fmt.Errorf("%q: %w", line, err)
		}
		memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
		if err != nil {
			return 0, 0, err
		}
		defer memory.Close()
		image := make([]byte, last-first)
		if _, err := memory.ReadAt(image, int64(first)); err != nil {
			return 0, 0, fmt.Errorf("read the vDSO: %w", err)
		}
		return functionIn(image, first)
	}
	return 0, 0, errors.New("no vDSO")
}

// functionIn finds the clock function in a vDSO that is mapped at an address.
func functionIn(image []byte, base uint64) (at, size uint64, err error) {
	file, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return 0, 0, fmt.Errorf("read the vDSO: %w", err)
	}
	symbols, err := file.DynamicSymbols()
	if err != nil {
		return 0, 0, fmt.Errorf("read the vDSO: %w", err)
	}
	for _, s := range symbols {
		if s.Name == clockFunction {
			return base + s.Value, s.Size, nil
		}
	}
	return 0, 0, errors.New("the vDSO has no " + clockFunction)
}
