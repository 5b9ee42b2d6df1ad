package readback

import "testing"

func TestCount(t *testing.T) {
	at := func(partition int32, offset int64) Place { return Place{partition, offset} }
	for name, tt := range map[string]struct {
		log          [][]string
		acknowledged map[string]Place
		want         Counts
	}{
		"exactly once": {
			[][]string{{"a 1", "a 3"}, {"a 2"}},
			map[string]Place{"a 1": at(0, 0), "a 3": at(0, 1), "a 2": at(1, 0)},
			Counts{},
		},
		"two names interleaved": {
			[][]string{{"b 1", "a 1", "b 2", "a 2"}},
			map[string]Place{"a 1": at(0, 1), "a 2": at(0, 3), "b 1": at(0, 0), "b 2": at(0, 2)},
			Counts{},
		},
		"missing":                {[][]string{{"a 1"}}, map[string]Place{"a 1": at(0, 0), "a 2": at(0, 1)}, Counts{Missing: 1}},
		"duplicated":             {[][]string{{"a 1", "a 2", "a 1", "a 1"}}, map[string]Place{"a 1": at(0, 3)}, Counts{Duplicated: 2}},
		"duplicated elsewhere":   {[][]string{{"a 1"}, {"a 1"}}, nil, Counts{Duplicated: 1}},
		"out of order":           {[][]string{{"a 1", "a 3", "a 2"}}, nil, Counts{OutOfOrder: 1}},
		"at another offset":      {[][]string{{"a 1", "a 2"}}, map[string]Place{"a 2": at(0, 0)}, Counts{Misplaced: 1}},
		"at an offset not there": {[][]string{{"a 1"}}, map[string]Place{"a 1": at(0, 7)}, Counts{Misplaced: 1}},
	} {
		if got := Count(tt.log, tt.acknowledged); got != tt.want {
			t.Errorf("%s: counted %+v, want %+v", name, got, tt.want)
		}
	}
}
