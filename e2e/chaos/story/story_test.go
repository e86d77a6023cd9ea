package story

import (
	"reflect"
	"slices"
	"testing"
	"time"
)

var cast = Cast{Nodes: []string{"n1", "n2", "n3", "n4"}, Programs: []string{"speaker", "proxy", "controller"}, Graceful: []string{"relay"},
	Services: []string{"a", "b"}, Idle: "idle", Router: true}

func TestTheSameSeedGivesTheSameStory(t *testing.T) {
	first := Generate(7, cast, 20)
	if again := Generate(7, cast, 20); !reflect.DeepEqual(first, again) {
		t.Error("two stories of one seed differ")
	}
	if other := Generate(8, cast, 20); reflect.DeepEqual(first.Rounds, other.Rounds) {
		t.Error("two seeds give one story")
	}
	if longer := Generate(7, cast, 30); !reflect.DeepEqual(first.Rounds, longer.Rounds[:20]) {
		t.Error("a longer story begins in another way")
	}
}

// TestStories checks what holds for every story.
func TestStories(t *testing.T) {
	calm := []Kind{DrainLabel, DrainTaint, Stop, Kill, RollPod, StopAPI, FreezeAPI, FreezeEtcd, MalformedARP, EditPool,
		HungProxy, ShiftClock, SlowAPI, AddPeer, ForeignRules, StopLong}
	storm := []Kind{Cut, Unplug, Crash, FreezeNode, FreezeSpeaker, Lossy, DropGossipIn, DropGossipOut, DropGossip, Deaf,
		DeleteRules, FlushConntrack, KillRouter, FreezeRouter, Spoof, StormStop, StormKill, StormAPI, StormEtcd, SpoofOn,
		ConntrackFull, NoDescriptors, FullDisk, RestoreEtcd, LeaveNode, RemovePeer, StormClock, StormSlowAPI,
		ForeignElements, NetlinkErrors, FreezeRelay, KillRelay, FillDisk, SlowEtcd, KillEtcd, Mute}
	churn := []Kind{AddService, RemoveService, Unready, Ready, Burst, Flood}
	configs := map[string]bool{}
	drawn := map[Kind]int{}
	for seed := range uint64(200) {
		last, there := 0, map[string]bool{}
		told := Generate(seed, cast, 10)
		configs[told.Config.String()] = true
		for _, r := range told.Rounds {
			wanted := storm
			if r.Calm {
				wanted = calm
			}
			at, touched := time.Duration(0), map[string]bool{}
			for _, e := range r.Events {
				drawn[e.Kind]++
				if e.ID != last+1 || e.At < at {
					t.Fatalf("seed %d: %s follows #%d", seed, e, last)
				}
				last, at = e.ID, e.At
				switch {
				case e.Kind == RemoveService && !there[e.Service]:
					t.Fatalf("seed %d: %s is not there", seed, e.Service)
				case e.Kind == AddService || e.Kind == HungProxy:
					there[e.Service] = true
				case e.Kind == RemoveService:
					delete(there, e.Service)
				}
				if slices.Contains(churn, e.Kind) {
					continue
				}
				if !slices.Contains(wanted, e.Kind) {
					t.Fatalf("seed %d: %s in a round that is calm: %v", seed, e, r.Calm)
				}
				if !r.Calm && touched[touches(e)] {
					t.Fatalf("seed %d: two faults of %s at once: %v", seed, touches(e), r.Events)
				}
				touched[touches(e)] = true
			}
			if len(there) > kept+calmEvents {
				t.Fatalf("seed %d: %d Services of churn", seed, len(there))
			}
		}
	}
	for _, kind := range slices.Concat(calm, storm, churn) {
		if drawn[kind] == 0 {
			t.Errorf("no story has %s", kind)
		}
	}
	if len(configs) != 3 {
		t.Errorf("the configurations are %v", configs)
	}
}

func TestPartsOfAStory(t *testing.T) {
	s := Generate(3, cast, 4)
	ids := s.IDs()
	if got := s.Only(ids); !reflect.DeepEqual(got, s) {
		t.Errorf("all events are %+v", got)
	}
	last := s.Rounds[3].Events[0]
	part := s.Only([]int{last.ID})
	if len(part.Rounds) != 1 || part.Rounds[0].Number != 4 || !reflect.DeepEqual(part.Rounds[0].Events, []Event{last}) {
		t.Errorf("one event is %+v", part)
	}
	if got := With(3, cast, []int{last.ID}); !reflect.DeepEqual(got, part) {
		t.Errorf("one event, drawn without the length of the story, is %+v", got)
	}
	if until := s.Until(2); len(until.Rounds) != 2 || !slices.Equal(until.IDs(), ids[:len(until.IDs())]) {
		t.Errorf("two rounds are %+v", until)
	}
}

func TestShrink(t *testing.T) {
	all := make([]int, 40)
	for i := range all {
		all[i] = i + 1
	}
	for _, need := range [][]int{{17}, {1, 40}, {3, 4, 31}, {5, 10, 15, 20, 25}} {
		calls := 0
		violates := func(part []int) bool {
			calls++
			return !slices.ContainsFunc(need, func(id int) bool { return !slices.Contains(part, id) })
		}
		if got := Shrink(all, 1000, violates); !slices.Equal(got, need) {
			t.Errorf("%v needed, %v left", need, got)
		}
		calls = 0
		got := Shrink(all, 5, violates)
		if calls > 5 || !violates(got) {
			t.Errorf("%v needed, %v left after %d of 5 tries", need, got, calls)
		}
	}
	if got := Shrink(all, 100, func([]int) bool { return false }); !slices.Equal(got, all) {
		t.Errorf("what violates in no part is shrunk to %v", got)
	}
}

// A fault that takes one node away alone is long enough for others to take over; beside another fault it is short.
func TestLoneFaultsLast(t *testing.T) {
	alone := 0
	for seed := range uint64(200) {
		for _, r := range Generate(seed, cast, 10).Rounds {
			fault, is := r.Alone()
			if is && fault.Kind.TakesNode() {
				alone++
			}
			for _, e := range r.Events {
				long := is && e.ID == fault.ID && e.Kind.TakesNode()
				if e.Kind.TakesNode() && (e.For > outage) != long {
					t.Errorf("seed %d, round %d: %s, alone: %v", seed, r.Number, e, long)
				}
			}
			if is && (r.Calm || fault.Kind.IsChurn()) {
				t.Errorf("seed %d, round %d: %s is a fault alone", seed, r.Number, fault)
			}
		}
	}
	if alone == 0 {
		t.Error("no storm has such a fault alone")
	}
}
